"""The sizes at which the battery tests a method, and the bytes that its state must take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple


class LayerShape(NamedTuple):
    """Sizes of the layer on which the battery tests a method."""

    B: int  # sequences
    K: int  # key/value heads
    G: int  # query heads of each
    H: int  # head size
    S: int  # capacity, tokens of a sequence
    prompt: int  # tokens of the longest prompt
    itemsize: int  # bytes of a number

    def kv_bytes(self, num_slots: int) -> int:
        """Bytes of the keys, or of the values, in `num_slots` slots of every head."""
        return self.B * self.K * num_slots * self.H * self.itemsize

    def position_bytes(self, num_slots: int, per_head: bool = False) -> int:
        """Bytes of the positions of `num_slots` slots, shared by all heads or one for each."""
        return 4 * self.B * num_slots * (self.K if per_head else 1)

    def count_bytes(self) -> int:
        """Bytes of one integer per sequence, such as the slots in use."""
        return 4 * self.B

    def num_slots(self, budget: int) -> int:
        """Slots after a selection of `budget` tokens: the kept tokens, and headroom in multiples of 16."""
        headroom = -(-(self.S - self.prompt) // 16) * 16
        return min(self.S, min(budget, self.prompt) + headroom)


class StateBytes(NamedTuple):
    """Bytes of one layer's state, by memory kind."""

    device: int
    pinned_host: int = 0


BytesFormula = Callable[[LayerShape], StateBytes]


@dataclasses.dataclass(frozen=True)
class MethodCase:
    """A method at a size at which it loses a part of the battery's prompts (up to nine tokens).

    Args:
      method: the method's name.
      small: its string at that size.
      lossless: its string at a size that loses nothing, where it must equal dense attention; "" for a method that is
        lossy at every size.
      state_bytes: bytes of a layer's state, from the paper and not from the code.
      exact_from: first decode step at which the lossless string equals dense attention.
      variant: distinguishes the case from others of the same method.
    """

    method: str
    small: str
    lossless: str
    state_bytes: BytesFormula
    exact_from: int = 0
    variant: str = ""

    @property
    def id(self) -> str:
        """The case's name in a test's parameters."""
        return f"{self.method}, {self.variant}" if self.variant else self.method


def sized_case(
    method: str,
    template: str,
    small: int,
    lossless: int,
    state_bytes: BytesFormula,
    *,
    exact_from: int = 0,
    variant: str = "",
) -> MethodCase:
    """Makes a case whose two strings differ in one number, `{}` in the template."""
    return MethodCase(method, template.format(small), template.format(lossless), state_bytes, exact_from, variant)


def full_bytes(shape: LayerShape) -> StateBytes:
    """All tokens unquantized on the device."""
    return StateBytes(2 * shape.kv_bytes(shape.S) + shape.position_bytes(shape.S) + shape.count_bytes())


def selection_bytes(budget: int, per_head: bool = True, bias: bool = False) -> BytesFormula:
    """Makes the formula for a selection of `budget` prompt tokens.

    Args:
      budget: prompt tokens that a head keeps.
      per_head: whether each head has a selection of its own.
      bias: whether a slot counts the tokens that it represents.
    """

    def count(shape: LayerShape) -> StateBytes:
        num_slots = shape.num_slots(budget)
        numbers = (1 + bias) * shape.position_bytes(num_slots, per_head)  # a bias is as large as a position
        return StateBytes(2 * shape.kv_bytes(num_slots) + numbers + shape.count_bytes())

    return count


def paged_bytes(budget: int, page: int, bias: bool = False, extra_pages: int = 0) -> BytesFormula:
    """Makes the formula for heads of unequal length in pages.

    Args:
      budget: prompt tokens that a head keeps on average.
      page: slots of a page.
      bias: whether a slot counts the tokens that it represents.
      extra_pages: further pages per head.
    """

    def count(shape: LayerShape) -> StateBytes:
        decoded = shape.num_slots(0)
        num_pages = -(-(shape.K * (budget + page - 1) // page) // shape.K) + extra_pages
        numbers = shape.position_bytes(num_pages * page, per_head=True)  # a bias is as large as a position
        pages = (
            2 * shape.kv_bytes(num_pages * page) + (1 + bias) * numbers + shape.position_bytes(num_pages, per_head=True)
        )
        return StateBytes(2 * shape.kv_bytes(decoded) + shape.position_bytes(decoded) + shape.count_bytes() + pages)

    return count


def constant_bytes(num_slots: int, policy_bytes: int = 0) -> BytesFormula:
    """Makes the formula for a policy's slots, shared by all heads; with `policy_bytes` each head has its own."""

    def count(shape: LayerShape) -> StateBytes:
        positions = shape.position_bytes(num_slots, per_head=policy_bytes > 0)
        return StateBytes(2 * shape.kv_bytes(num_slots) + positions + shape.B * shape.K * num_slots * policy_bytes)

    return count
