"""MiKV in NumPy, float64, from its paper (2402.18096, sections 3.1 and 3.2): one head of one row."""

from __future__ import annotations

from math import floor

import numpy as np


def low(received: np.ndarray, share: float, recent: float) -> list[int]:
    """Attention received [n] -> the tokens of the low tier, ascending; of equal ones the earlier."""
    n = len(received)
    count = floor(share * n + 1e-9)
    newest = floor(recent * (n - count) + 1e-9)
    order = sorted(range(n - newest), key=lambda t: (received[t], t))
    return sorted(order[:count])


def weights(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Queries q [G n H] and keys k [n H] of a prompt -> what each channel is multiplied by, [H]."""
    asked, held = np.abs(q).max((0, 1)), np.abs(k).max(0)
    return np.array([np.sqrt(a / b) if a > 0 and b > 0 else 1.0 for a, b in zip(asked, held, strict=True)])


def levels(row: np.ndarray, bits: int, group: int) -> np.ndarray:
    """A token's row [H], in groups of channels: each rounded to 2^bits levels from its minimum to its maximum."""
    out = row.astype(float).copy()
    for first in range(0, len(row), group):
        part = row[first : first + group]
        step = (part.max() - part.min()) / (2**bits - 1)
        if step > 0:
            out[first : first + group] = np.round((part - part.min()) / step) * step + part.min()
    return out


def held(k, v, tokens: list[int], b, bits: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [n H], of which some tokens are in few bits."""
    k, v = k.astype(float).copy(), v.astype(float).copy()
    for t in tokens:
        k[t], v[t] = levels(k[t] * b, bits, group) / b, levels(v[t], bits, group)
    return k, v
