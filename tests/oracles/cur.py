"""CURPress of kvpress in NumPy, float64, after CurDKV (arXiv 2509.15038): one key/value head of one sequence."""

from __future__ import annotations

import numpy as np


def local_leverage(x: np.ndarray, window: int) -> np.ndarray:
    """The squared norms of x [S H] over their sum in windows from the first token on, [S]."""
    out = np.zeros(len(x))
    for first in range(0, len(x), window):
        squares = (x[first : first + window] ** 2).sum(1)
        out[first : first + window] = squares / squares.sum()
    return out


def scores(k: np.ndarray, v: np.ndarray, window: int, leverage: str = "product") -> np.ndarray:
    """The scores [S] of tokens with k, v [S H]."""
    key_leverage, value_leverage = local_leverage(k, window), local_leverage(v, window)
    score = {
        "product": key_leverage * value_leverage,
        "mean": (key_leverage + value_leverage) / 2,
        "key": key_leverage,
        "value": value_leverage,
    }[leverage]
    return score / score.sum()


def select_tokens(scores: np.ndarray, budget: int, sinks: int) -> list[int]:
    """Selects the sinks and the highest scores, ascending."""
    ranking = np.where(np.arange(len(scores)) < sinks, np.inf, scores)
    return sorted(np.argsort(-ranking, kind="stable")[:budget].tolist())
