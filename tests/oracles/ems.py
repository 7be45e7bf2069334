"""EMS in NumPy, float64, from its description (2412.08521): one row, one key/value head of G query heads."""

from __future__ import annotations

import numpy as np

from tests.oracles.merge import lost_of, near


def scores(a: np.ndarray, window: int) -> np.ndarray:
    """Causal attention a [G T T] -> [T]: shares of the mean over the queries that see a token, and of the last ones."""
    T = a.shape[1]
    total = np.zeros(T)
    for weights in a:
        everywhere = np.array([weights[s:, s].mean() for s in range(T)])
        nearby = weights[-window:].sum(0)
        total += everywhere / everywhere.sum() + nearby / nearby.sum()
    return total / len(a)


def kept(score: np.ndarray, budget: int, window: int) -> list[int]:
    """The last tokens and the best of the others."""
    T = len(score)
    if budget >= T:
        return list(range(T))
    old = sorted(range(T - window), key=lambda t: -score[t])
    return sorted([*old[: budget - window], *range(T - window, T)])


def merged(k, v, score, stay, band: float, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """k, v [T H] -> keys and values of the tokens that stay."""
    k, v = np.asarray(k, float), np.asarray(v, float)
    ranked = sorted(lost_of(k, stay), key=lambda t: -score[t])[: int(band * len(stay))]
    centre = {t: near(k, stay, t) for t in ranked}
    norm = np.linalg.norm(k, axis=1)
    keys, values = [], []
    for place, s in enumerate(stay):
        mine = [s] + [t for t, (to, u) in centre.items() if to == place and u >= threshold]
        w = np.array([score[t] for t in mine]) / sum(score[t] for t in mine)
        direction = w @ (k[mine] / norm[mine][:, None])
        keys.append(direction / np.linalg.norm(direction) * (w @ norm[mine]))
        values.append(w @ v[mine])
    return np.array(keys), np.array(values)
