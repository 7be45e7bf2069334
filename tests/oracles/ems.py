"""EMS in NumPy, float64, from its paper (arXiv 2412.08521): one sequence, one key/value head of G query heads."""

from __future__ import annotations

import numpy as np

from tests.oracles.merge import evicted_tokens, nearest_kept


def scores(attention: np.ndarray, window: int) -> np.ndarray:
    """The sum of two scores [T] of causal attention [G T T]: its mean over queries, and the last queries'."""
    T = attention.shape[1]
    total = np.zeros(T)
    for weights in attention:
        mean_attention = np.array([weights[s:, s].mean() for s in range(T)])
        recent_attention = weights[-window:].sum(0)
        total += mean_attention / mean_attention.sum() + recent_attention / recent_attention.sum()
    return total / len(attention)


def select_tokens(scores: np.ndarray, budget: int, window: int) -> list[int]:
    """Selects the last tokens and the best of the others."""
    T = len(scores)
    if budget >= T:
        return list(range(T))
    old = sorted(range(T - window), key=lambda t: -scores[t])
    return sorted([*old[: budget - window], *range(T - window, T)])


def merge_tokens(k, v, scores, tokens, band: float, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Merges evicted tokens into the kept ones: k, v [T H] -> keys and values of the kept tokens."""
    k, v = np.asarray(k, float), np.asarray(v, float)
    merged = sorted(evicted_tokens(k, tokens), key=lambda t: -scores[t])[: int(band * len(tokens))]
    nearest = {t: nearest_kept(k, tokens, t) for t in merged}
    norm = np.linalg.norm(k, axis=1)
    keys, values = [], []
    for place, s in enumerate(tokens):
        group = [s] + [t for t, (to, u) in nearest.items() if to == place and u >= threshold]
        w = np.array([scores[t] for t in group]) / sum(scores[t] for t in group)
        direction = w @ (k[group] / norm[group][:, None])
        keys.append(direction / np.linalg.norm(direction) * (w @ norm[group]))
        values.append(w @ v[group])
    return np.array(keys), np.array(values)
