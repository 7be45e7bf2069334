"""CURPress of kvpress in NumPy, float64: one row of one key/value head."""

from __future__ import annotations

import numpy as np


def share(x: np.ndarray, window: int) -> np.ndarray:
    """x [S H] -> [S]: squared norms over their sum in windows from the first token on."""
    out = np.zeros(len(x))
    for first in range(0, len(x), window):
        square = (x[first : first + window] ** 2).sum(1)
        out[first : first + window] = square / square.sum()
    return out


def scores(k: np.ndarray, v: np.ndarray, window: int, leverage: str = "product") -> np.ndarray:
    """k, v [S H] -> [S]."""
    a, b = share(k, window), share(v, window)
    score = {"product": a * b, "mean": (a + b) / 2, "key": a, "value": b}[leverage]
    return score / score.sum()


def kept(score: np.ndarray, budget: int, sinks: int) -> list[int]:
    """The sinks and the highest scores, ascending."""
    rank = np.where(np.arange(len(score)) < sinks, np.inf, score)
    return sorted(np.argsort(-rank, kind="stable")[:budget].tolist())
