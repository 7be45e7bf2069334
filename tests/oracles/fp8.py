"""FP8 in NumPy, float64 (arXiv 2209.05433; scales as in vLLM): numbers are rounded by a list of a format's numbers."""

from __future__ import annotations

import numpy as np


def representable_numbers(exponent_bits: int, mantissa_bits: int, largest: float) -> np.ndarray:
    """The non-negative numbers of a format with these bits, ascending up to `largest`; code i has number i."""
    bias = 2 ** (exponent_bits - 1) - 1
    subnormal = [m / 2**mantissa_bits * 2.0 ** (1 - bias) for m in range(2**mantissa_bits)]
    normal = [
        (1 + m / 2**mantissa_bits) * 2.0 ** (e - bias)
        for e in range(1, 2**exponent_bits)
        for m in range(2**mantissa_bits)
    ]
    return np.array([x for x in subnormal + normal if x <= largest])


FORMATS = {"e4m3": representable_numbers(4, 3, 448.0), "e5m2": representable_numbers(5, 2, 57344.0)}


def round_to_format(x: float, format_name: str) -> float:
    """The format's number nearest to x; a tie goes to the even code."""
    numbers = FORMATS[format_name]
    distances = np.abs(numbers - abs(x))
    best = min(np.flatnonzero(distances == distances.min()), key=lambda i: i % 2)
    return float(np.copysign(numbers[best], x))


def fake_quantize(x: np.ndarray, format_name: str = "e4m3") -> np.ndarray:
    """Rounds a vector [H] to the format, scaled so that its largest number is the format's largest."""
    scale = max(np.abs(x).max() / FORMATS[format_name][-1], 1e-6)
    return np.array([round_to_format(y / scale, format_name) for y in x]) * scale
