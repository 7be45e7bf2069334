"""LagKV in NumPy, float64, from its paper (2504.04704) and kvpress: one row of one key/value head."""

from __future__ import annotations

import numpy as np


def spread(part: np.ndarray, following: np.ndarray) -> np.ndarray:
    """part, following [c H] -> [c]: softmax over the tokens of how unequal their places in the next partition are."""
    low, high = following.min(0), following.max(0)
    found = []
    for token in part:
        places = [(x - a) / (b - a) if b > a else 0.0 for x, a, b in zip(token, low, high, strict=True)]
        mean = sum(places) / len(places)
        found.append(np.sqrt(sum((x - mean) ** 2 for x in places) / (len(places) - 1)))
    p = np.exp(np.array(found) - max(found))
    return p / p.sum()


def scores(k: np.ndarray, v: np.ndarray, lag: int, sinks: int, cross: bool = False) -> np.ndarray:
    """k, v [S H] -> [S], NaN for tokens without a whole partition behind their own, and for sinks."""
    out = np.full(len(k), np.nan)
    first = sinks
    while first + 2 * lag <= len(k):
        this, following = slice(first, first + lag), slice(first + lag, first + 2 * lag)
        score = (spread(k[this], k[following]) + spread(v[this], v[following])) / 2
        rank = [sum(other < one for other in score) for one in score]
        out[this] = score if cross else np.array(rank) / lag
        first += lag
    return out


def kept(score: np.ndarray, budget: int, sinks: int) -> list[int]:
    """Which tokens stay, ascending: sinks, then the latest without a score, then the highest scores."""

    def worth(i: int) -> tuple:
        if i < sinks:
            return 2, 0
        return (1, i) if np.isnan(score[i]) else (0, score[i], -i)

    return sorted(sorted(range(len(score)), key=worth, reverse=True)[:budget])
