"""FP8 in NumPy, float64: all numbers that a format has are listed, and each number takes the nearest of them."""

from __future__ import annotations

import numpy as np


def numbers(exponent: int, mantissa: int, largest: float) -> np.ndarray:
    """The numbers from 0 to the largest of a format with so many bits of each, ascending; code i has number i."""
    bias = 2 ** (exponent - 1) - 1
    below = [m / 2**mantissa * 2.0 ** (1 - bias) for m in range(2**mantissa)]
    above = [(1 + m / 2**mantissa) * 2.0 ** (e - bias) for e in range(1, 2**exponent) for m in range(2**mantissa)]
    return np.array([x for x in below + above if x <= largest])


FORMATS = {"e4m3": numbers(4, 3, 448.0), "e5m2": numbers(5, 2, 57344.0)}


def nearest(x: float, kind: str) -> float:
    """The format's number nearest to x; of two equally near ones that with an even code."""
    listed = FORMATS[kind]
    far = np.abs(listed - abs(x))
    best = min(np.flatnonzero(far == far.min()), key=lambda i: i % 2)
    return float(np.copysign(listed[best], x))


def row(x: np.ndarray, kind: str = "e4m3") -> np.ndarray:
    """x [H] through the format, its largest number at the format's largest."""
    scale = max(np.abs(x).max() / FORMATS[kind][-1], 1e-6)
    return np.array([nearest(y / scale, kind) for y in x]) * scale
