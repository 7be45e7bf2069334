"""A-shape prompt attention in NumPy, float64, from its pattern: every key of one row masked, one query at a time."""

from __future__ import annotations

import numpy as np


def read_by(t: int, sinks: int, recent: int) -> list[int]:
    """Positions that the query at t reads."""
    return sorted(set(range(min(sinks, t + 1))) | set(range(max(t - recent + 1, 0), t + 1)))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: int, recent: int) -> np.ndarray:
    """q [K G T H], k, v [K T H] -> [K G T H]."""
    out = np.empty(q.shape)
    for t in range(q.shape[2]):
        seen = read_by(t, sinks, recent)
        s = np.einsum("kgh,ksh->kgs", q[:, :, t], k[:, seen]) / np.sqrt(q.shape[-1])
        p = np.exp(s - s.max(-1, keepdims=True))
        out[:, :, t] = np.einsum("kgs,ksh->kgh", p / p.sum(-1, keepdims=True), v[:, seen])
    return out
