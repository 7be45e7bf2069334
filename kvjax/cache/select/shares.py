"""How a budget is divided among the layers once all of them have seen the prompt."""

from __future__ import annotations

from typing import Any

from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block


class LayerShares:
    """The `shares` slot of a method: each layer measures its prompt, and gets tokens by its measure."""

    queries: int | None = 0  # of a row's last prompt queries, as in `Needs`

    def measure(self, layer: Any, block: Block, seen: Obs | None) -> Array:
        """f32[B]: what the shares are made of, from one layer's prompt."""
        raise NotImplementedError

    def tokens(self, layer: Any, measures: Array, lengths: Array) -> Array:
        """Measures f32[L B] of prompts of lengths i32[B] -> the tokens that each layer keeps, i32[L B]."""
        raise NotImplementedError
