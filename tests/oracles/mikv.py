"""MiKV in NumPy, float64, from its paper (arXiv 2402.18096, sections 3.1 and 3.2): one head of one sequence."""

from __future__ import annotations

from math import floor

import numpy as np


def low_tier_tokens(received: np.ndarray, fraction: float, recent: float) -> list[int]:
    """The tokens of the low tier, ascending, by attention received [n]; ties go to the earlier token."""
    n = len(received)
    count = floor(fraction * n + 1e-9)
    num_recent = floor(recent * (n - count) + 1e-9)
    order = sorted(range(n - num_recent), key=lambda t: (received[t], t))
    return sorted(order[:count])


def channel_balance(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The factor of each key channel [H], from queries q [G n H] and keys k [n H] of a prompt."""
    query_max, key_max = np.abs(q).max((0, 1)), np.abs(k).max(0)
    return np.array([np.sqrt(a / b) if a > 0 and b > 0 else 1.0 for a, b in zip(query_max, key_max, strict=True)])


def round_to_levels(vector: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Rounds each group of channels of a vector [H] to 2^bits levels from its minimum to its maximum."""
    out = vector.astype(float).copy()
    for first in range(0, len(vector), group):
        numbers = vector[first : first + group]
        step = (numbers.max() - numbers.min()) / (2**bits - 1)
        if step > 0:
            out[first : first + group] = np.round((numbers - numbers.min()) / step) * step + numbers.min()
    return out


def reconstruct(k, v, tokens: list[int], balance, bits: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """The stored keys and values [n H] when these tokens are quantized."""
    k, v = k.astype(float).copy(), v.astype(float).copy()
    for t in tokens:
        k[t], v[t] = round_to_levels(k[t] * balance, bits, group) / balance, round_to_levels(v[t], bits, group)
    return k, v
