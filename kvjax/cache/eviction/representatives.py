"""The component `representatives`: gives a part of a selection's budget to tokens that stand for evicted ones."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from kvjax.core.types import Array
from kvjax.errors import KvjaxError


class EvictableUnits(NamedTuple):
    """The units of a prompt, c tokens each, among which representatives are chosen, and the features to go by."""

    scores: Array  # f32[B K G U c], of each query head
    keys: Array  # [B K U c H], arbitrary where not valid
    valid: Array  # bool[B U], the evictable units of the sequence
    candidates: Array  # bool[B U], units that no head keeps for their score


@runtime_checkable
class Representatives(Protocol):
    """Keeps some of the units that a selection would evict, so that they stand for the others (KVCrush, k-means)."""

    @property
    def share(self) -> float:
        """The fraction of the kept units that representatives take, rounded down."""
        ...

    def choose(self, units: EvictableUnits, count: Array, places: int) -> Array:
        """Chooses at most `count` i32[B] of each sequence's candidates.

        Returns:
          i32[B places], distinct units, -1 where there is none.
        """
        ...


IntOrArray = TypeVar("IntOrArray", int, Array, np.ndarray)


def fraction_of(share: float, units: IntOrArray) -> IntOrArray:
    """floor(share * units), in integers, so that 0.7 of 10 is 7: `share` is taken as the nearest n / d, d <= 1000."""
    ratio = Fraction(share).limit_denominator(1000)
    return units * ratio.numerator // ratio.denominator


def check_share(share: float) -> None:
    """Raises KvjaxError unless `share` lies in [0, 1]."""
    if not 0 <= share <= 1:
        raise KvjaxError(f"share must lie in [0, 1], got {share}; KVCrush uses 0.25")
