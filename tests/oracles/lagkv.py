"""LagKV in NumPy, float64, from its paper (arXiv 2504.04704) and kvpress: one key/value head of one sequence."""

from __future__ import annotations

import numpy as np


def spread_scores(part: np.ndarray, following: np.ndarray) -> np.ndarray:
    """The softmax [c] over tokens of the deviation of their channels, scaled to the ranges of the next partition."""
    low, high = following.min(0), following.max(0)
    deviations = []
    for token in part:
        normalized = [(x - a) / (b - a) if b > a else 0.0 for x, a, b in zip(token, low, high, strict=True)]
        mean = sum(normalized) / len(normalized)
        deviations.append(np.sqrt(sum((x - mean) ** 2 for x in normalized) / (len(normalized) - 1)))
    weights = np.exp(np.array(deviations) - max(deviations))
    return weights / weights.sum()


def scores(k: np.ndarray, v: np.ndarray, lag: int, sinks: int, cross: bool = False) -> np.ndarray:
    """The scores [S] of k, v [S H]; NaN for sinks and for tokens without a whole partition after their own."""
    out = np.full(len(k), np.nan)
    start = sinks
    while start + 2 * lag <= len(k):
        this, following = slice(start, start + lag), slice(start + lag, start + 2 * lag)
        chunk_scores = (spread_scores(k[this], k[following]) + spread_scores(v[this], v[following])) / 2
        rank = [sum(other < one for other in chunk_scores) for one in chunk_scores]
        out[this] = chunk_scores if cross else np.array(rank) / lag
        start += lag
    return out


def select_tokens(scores: np.ndarray, budget: int, sinks: int) -> list[int]:
    """Selects the sinks, then the latest tokens without a score, then the highest scores; ascending."""

    def rank_key(i: int) -> tuple:
        if i < sinks:
            return 2, 0
        return (1, i) if np.isnan(scores[i]) else (0, scores[i], -i)

    return sorted(sorted(range(len(scores)), key=rank_key, reverse=True)[:budget])
