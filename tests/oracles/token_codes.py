"""Integer codes per token and head in NumPy, float64, from vLLM's rules for 4 and 8 bits, one vector at a time.

The rotation is QuaRot's (arXiv 2404.00456, section 3).
"""

from __future__ import annotations

import math

import numpy as np


def round_half_away(x: float) -> int:
    """Rounds to the nearest whole number, halves away from zero."""
    return int(math.copysign(math.floor(abs(x) + 0.5), x))


def quantize_min_max(x: np.ndarray, bits: int = 4) -> tuple[list[int], int, float]:
    """Quantizes x [H] -> (codes, zero point, scale); the range includes zero."""
    top = 2**bits - 1
    scale = max((max(x.max(), 0.0) - min(x.min(), 0.0)) / top, 1e-6)
    zero = min(max(round_half_away(-min(x.min(), 0.0) / scale), 0), top)
    return [min(max(round_half_away(y / scale + zero), 0), top) for y in x.tolist()], zero, scale


def dequantize_min_max(codes: list[int], zero: int, scale: float) -> np.ndarray:
    """Decodes a vector [H]."""
    return (np.array(codes) - zero) * scale


def fake_quantize_absmax(x: np.ndarray) -> np.ndarray:
    """Quantizes x [H] to eight bits and back."""
    scale = max(np.abs(x).max() / 127, 1e-6)
    return np.clip(np.rint(x / scale), -128, 127) * scale


def hadamard(H: int) -> np.ndarray:
    """The Hadamard matrix [H H]: (-1)^(ones that i and j share in binary) / sqrt(H)."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(H)] for i in range(H)]) / np.sqrt(H)
