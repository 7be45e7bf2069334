"""CURPress of kvpress in NumPy, float64: one row of one key/value head."""

from __future__ import annotations

import numpy as np


def local_leverage(x: np.ndarray, window: int) -> np.ndarray:
    """x [S H] -> [S]: squared norms over their sum in windows from the first token on."""
    out = np.zeros(len(x))
    for first in range(0, len(x), window):
        squares = (x[first : first + window] ** 2).sum(1)
        out[first : first + window] = squares / squares.sum()
    return out


def scores(k: np.ndarray, v: np.ndarray, window: int, leverage: str = "product") -> np.ndarray:
    """k, v [S H] -> [S]."""
    key_leverage, value_leverage = local_leverage(k, window), local_leverage(v, window)
    score = {
        "product": key_leverage * value_leverage,
        "mean": (key_leverage + value_leverage) / 2,
        "key": key_leverage,
        "value": value_leverage,
    }[leverage]
    return score / score.sum()


def select_tokens(scores: np.ndarray, budget: int, sinks: int) -> list[int]:
    """The sinks and the highest scores, ascending."""
    ranking = np.where(np.arange(len(scores)) < sinks, np.inf, scores)
    return sorted(np.argsort(-ranking, kind="stable")[:budget].tolist())
