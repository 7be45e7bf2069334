"""The component `representatives`: gives a part of a selection's budget to tokens that stand for evicted ones."""

from __future__ import annotations

from fractions import Fraction
from typing import TypeVar

import numpy as np

from kvjax.core.types import Array

IntOrArray = TypeVar("IntOrArray", int, Array, np.ndarray)


def fraction_of(share: float, units: IntOrArray) -> IntOrArray:
    """floor(share * units), in integers, so that 0.7 of 10 is 7: `share` is taken as the nearest n / d, d <= 1000."""
    ratio = Fraction(share).limit_denominator(1000)
    return units * ratio.numerator // ratio.denominator
