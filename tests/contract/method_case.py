"""The sizes at which the battery tries a method, and the bytes that it must take there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple


class LayerShape(NamedTuple):
    """The layer on which the battery tries a method."""

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
        """Slots after a selection of `budget` tokens: what it keeps, and headroom in multiples of 16."""
        headroom = -(-(self.S - self.prompt) // 16) * 16
        return min(self.S, min(budget, self.prompt) + headroom)


class StateBytes(NamedTuple):
    """Bytes of one layer's state, by memory kind."""

    device: int
    pinned_host: int = 0


BytesFormula = Callable[[LayerShape], StateBytes]


@dataclasses.dataclass(frozen=True)
class MethodCase:
    """A method at a size that loses something of the battery's prompts (up to nine tokens), and what must hold.

    Args:
      method: the method's name.
      small: its string at that size.
      lossless: its string with room for everything, where it must equal dense attention; "" for a method without such
        a limit.
      state_bytes: bytes of a layer's state, from the paper and not from the code.
      exact_from: first decode step at which the lossless string equals dense attention.
      variant: tells the case from others of the same method.
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


def everything(x: LayerShape) -> StateBytes:
    """All tokens unquantized on the device."""
    return StateBytes(2 * x.kv_bytes(x.S) + x.position_bytes(x.S) + x.count_bytes())


def selected(budget: int, per_head: bool = True, bias: bool = False) -> BytesFormula:
    """A selection of `budget` prompt tokens.

    Args:
      budget: prompt tokens that a head keeps.
      per_head: whether each head has a selection of its own.
      bias: whether a slot notes how many tokens it stands for.
    """

    def count(x: LayerShape) -> StateBytes:
        num_slots = x.num_slots(budget)
        numbers = (1 + bias) * x.position_bytes(num_slots, per_head)  # a bias is as large as a position
        return StateBytes(2 * x.kv_bytes(num_slots) + numbers + x.count_bytes())

    return count


def paged(budget: int, page: int, bias: bool = False, extra_pages: int = 0) -> BytesFormula:
    """Heads of unequal length, in pages.

    Args:
      budget: prompt tokens that a head keeps on average.
      page: slots of a page.
      bias: whether a slot notes how many tokens it stands for.
      extra_pages: further pages per head.
    """

    def count(x: LayerShape) -> StateBytes:
        decoded = x.num_slots(0)
        num_pages = -(-(x.K * (budget + page - 1) // page) // x.K) + extra_pages
        numbers = x.position_bytes(num_pages * page, per_head=True)  # a bias is as large as a position
        pages = 2 * x.kv_bytes(num_pages * page) + (1 + bias) * numbers + x.position_bytes(num_pages, per_head=True)
        return StateBytes(2 * x.kv_bytes(decoded) + x.position_bytes(decoded) + x.count_bytes() + pages)

    return count


def constant(num_slots: int, policy_bytes: int = 0) -> BytesFormula:
    """A policy's slots, shared by all heads; with `policy_bytes` per slot each head has its own."""

    def count(x: LayerShape) -> StateBytes:
        positions = x.position_bytes(num_slots, per_head=policy_bytes > 0)
        return StateBytes(2 * x.kv_bytes(num_slots) + positions + x.B * x.K * num_slots * policy_bytes)

    return count
