"""What becomes of the tokens that a selection loses: folded into those that stay."""

from __future__ import annotations

from typing import Protocol

from kvjax.cache.contract import LayerSpec
from kvjax.cache.select.select import Choice
from kvjax.core.types import Block


class Merge(Protocol):
    """The `merge` slot of a method: keys and values of lost tokens go into kept ones."""

    def __call__(self, block: Block, kept: Block, choice: Choice, spec: LayerSpec) -> Block:
        """The prompt's block, what stays of it, and the choice that was made -> what stays, with the lost folded in.

        Slots keep their positions. A slot that stands for several tokens may say so in `Block.bias`.
        """
