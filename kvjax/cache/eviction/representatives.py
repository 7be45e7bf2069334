"""A share of a selection's budget for tokens that stand for the lost ones: the slot that KVCrush and k-means fill."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from kvjax.core.types import Array
from kvjax.errors import KvjaxError


class Units(NamedTuple):
    """What representatives are chosen by, and from: the evictable units of each row, c tokens each."""

    scores: Array  # f32[B K G U c], of each query head
    keys: Array  # [B K U c H], anything where not valid
    valid: Array  # bool[B U], the evictable units of the row
    candidates: Array  # bool[B U], those that no head keeps for their score


@runtime_checkable
class Representatives(Protocol):
    """Which of the lost units are kept after all, to stand for the others."""

    @property
    def share(self) -> float:
        """The fraction of the units that the budget has room for which representatives take, rounded down."""
        ...

    def choose(self, units: Units, count: Array, places: int) -> Array:
        """At most `count` i32[B] of each row's candidates -> distinct units i32[B places], -1 where there is none."""
        ...


Count = TypeVar("Count", int, Array, np.ndarray)


def fraction_of(share: float, units: Count) -> Count:
    """floor(share * units) in integers, so that 0.7 of 10 is 7; share to the nearest n / d with d up to 1000."""
    f = Fraction(share).limit_denominator(1000)
    return units * f.numerator // f.denominator


def check_share(share: float) -> None:
    """Raises KvjaxError unless a share lies in [0, 1]."""
    if not 0 <= share <= 1:
        raise KvjaxError(f"share must lie in [0, 1], got {share}; KVCrush uses 0.25")
