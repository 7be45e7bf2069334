"""KeyDiff in NumPy, float64, from its paper (2504.15364, section 3): one row of one key/value head."""

from __future__ import annotations

import numpy as np


def scores(keys: np.ndarray) -> np.ndarray:
    """keys [S H] -> [S]: minus the cosine to the mean of the keys at unit length."""
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    anchor = unit.mean(0)
    return -unit @ anchor / np.linalg.norm(anchor)


def kept(keys: np.ndarray, tokens: list[int], budget: int) -> list[int]:
    """The `budget` of these tokens with the highest scores among themselves, ascending."""
    order = np.argsort(-scores(keys[tokens]), kind="stable")[:budget]
    return sorted(tokens[i] for i in order)


def every_step(q: np.ndarray, k: np.ndarray, v: np.ndarray, n: int, budget: int) -> np.ndarray:
    """q [G S H], k, v [S H], a prompt of n tokens -> outputs [G S-n H]: before each token back to the budget."""
    G, S, H = q.shape
    held, out = kept(k, list(range(n)), budget), np.empty((G, S - n, H))
    for t in range(n, S):
        held = [*kept(k, held, budget), t]
        s = q[:, t] @ k[held].T / np.sqrt(H)
        p = np.exp(s - s.max(-1, keepdims=True))
        out[:, t - n] = p / p.sum(-1, keepdims=True) @ v[held]
    return out
