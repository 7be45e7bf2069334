"""KeyDiff in NumPy, float64, from its paper (arXiv 2504.15364, section 3): one key/value head of one sequence."""

from __future__ import annotations

import numpy as np


def scores(keys: np.ndarray) -> np.ndarray:
    """The negative cosine [S] of keys [S H] to the mean of all keys at unit length."""
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    anchor = unit.mean(0)
    return -unit @ anchor / np.linalg.norm(anchor)


def select_tokens(keys: np.ndarray, tokens: list[int], budget: int) -> list[int]:
    """Selects the `budget` tokens with the highest scores among these, ascending."""
    order = np.argsort(-scores(keys[tokens]), kind="stable")[:budget]
    return sorted(tokens[i] for i in order)


def decode(q: np.ndarray, k: np.ndarray, v: np.ndarray, n: int, budget: int) -> np.ndarray:
    """Decodes q [G S H], k, v [S H], a prompt of n tokens -> outputs [G S-n H]; evicts before each token."""
    G, S, H = q.shape
    cached, out = select_tokens(k, list(range(n)), budget), np.empty((G, S - n, H))
    for t in range(n, S):
        cached = [*select_tokens(k, cached, budget), t]
        logits = q[:, t] @ k[cached].T / np.sqrt(H)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[:, t - n] = weights / weights.sum(-1, keepdims=True) @ v[cached]
    return out
