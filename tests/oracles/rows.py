"""Row codes in NumPy, float64, from vLLM's rules for 4 and 8 bits per token and head: one row at a time."""

from __future__ import annotations

import math

import numpy as np


def round_half_away(x: float) -> int:
    """The nearest whole number, halves away from zero."""
    return int(math.copysign(math.floor(abs(x) + 0.5), x))


def quantize_min_max(x: np.ndarray, bits: int = 4) -> tuple[list[int], int, float]:
    """x [H] -> (codes, zero, scale); the range takes zero in."""
    top = 2**bits - 1
    scale = max((max(x.max(), 0.0) - min(x.min(), 0.0)) / top, 1e-6)
    zero = min(max(round_half_away(-min(x.min(), 0.0) / scale), 0), top)
    return [min(max(round_half_away(y / scale + zero), 0), top) for y in x.tolist()], zero, scale


def dequantize_min_max(codes: list[int], zero: int, scale: float) -> np.ndarray:
    """Decodes a row -> [H]."""
    return (np.array(codes) - zero) * scale


def fake_quantize_absmax(x: np.ndarray) -> np.ndarray:
    """x [H] in eight bits and back."""
    scale = max(np.abs(x).max() / 127, 1e-6)
    return np.clip(np.rint(x / scale), -128, 127) * scale


def hadamard(H: int) -> np.ndarray:
    """[H H], entry (i, j) is -1 to the number of ones that i and j share in binary, over the root of H."""
    return np.array([[(-1) ** (i & j).bit_count() for j in range(H)] for i in range(H)]) / np.sqrt(H)
