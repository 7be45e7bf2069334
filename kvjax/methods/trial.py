"""Small settings of a method for the battery of tests: each file of this folder states its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple


class Sizes(NamedTuple):
    """The layer on which the battery tries a method."""

    B: int  # rows
    K: int  # key/value heads
    G: int  # query heads of each
    H: int  # head dim
    S: int  # capacity, tokens per row
    prompt: int  # tokens of the longest prompt
    itemsize: int  # bytes of a number

    def rows(self, slots: int) -> int:
        """Bytes of keys, or of values, in so many slots of every head."""
        return self.B * self.K * slots * self.H * self.itemsize

    def positions(self, slots: int, per_head: bool = False) -> int:
        """Bytes of the positions of so many slots: one for all heads, or one for each."""
        return 4 * self.B * slots * (self.K if per_head else 1)

    def per_row(self) -> int:
        """Bytes of one number per row, such as the slots in use."""
        return 4 * self.B

    def left(self, budget: int) -> int:
        """Slots after a selection of so many tokens: what it leaves, and room for what follows in whole sixteens."""
        room = -(-(self.S - self.prompt) // 16) * 16
        return min(self.S, min(budget, self.prompt) + room)


class Bytes(NamedTuple):
    """Bytes of one layer's state, by memory kind."""

    device: int
    pinned_host: int = 0


def everything(x: Sizes) -> Bytes:
    """What all tokens take, plainly and on the device."""
    return Bytes(2 * x.rows(x.S) + x.positions(x.S) + x.per_row())


def selected(budget: int, per_head: bool = True) -> Callable[[Sizes], Bytes]:
    """What a selection of so many prompt tokens takes; per_head: whether each head has its own."""

    def count(x: Sizes) -> Bytes:
        slots = x.left(budget)
        return Bytes(2 * x.rows(slots) + x.positions(slots, per_head) + x.per_row())

    return count


def paged(budget: int, page: int, bias: bool = False, beside: int = 0) -> Callable[[Sizes], Bytes]:
    """What heads of unequal lengths take that keep so many prompt tokens in the mean, in pages of `page` slots.

    bias: whether slots say how many tokens they stand for. beside: further pages of each shelf.
    """

    def count(x: Sizes) -> Bytes:
        decoded = x.left(0)
        shelf = -(-(x.K * (budget + page - 1) // page) // x.K) + beside  # pages
        numbers = x.positions(shelf * page, per_head=True)  # a bias is as large as a position
        pages = 2 * x.rows(shelf * page) + (1 + bias) * numbers + x.positions(shelf, per_head=True)
        return Bytes(2 * x.rows(decoded) + x.positions(decoded) + x.per_row() + pages)

    return count


def constant(slots: int, marks: int = 0) -> Callable[[Sizes], Bytes]:
    """What a policy takes in so many slots: shared by all heads, or each head's own with `marks` bytes per slot."""

    def count(x: Sizes) -> Bytes:
        return Bytes(2 * x.rows(slots) + x.positions(slots, bool(marks)) + x.B * x.K * slots * marks)

    return count


@dataclasses.dataclass(frozen=True)
class Trial:
    """A method at a size that loses something in the battery's prompts of up to nine tokens, and what to expect of it.

    small: its string. limit: the same with room for everything, where it must equal dense attention, from decode step
    `exact_from` on; empty for a method that has no such limit. bytes: what the layer's state takes, from the recipe and
    not from the code. name: what tells it from other trials of the same recipe.
    """

    small: str
    limit: str
    bytes: Callable[[Sizes], Bytes]
    exact_from: int = 0
    name: str = ""
