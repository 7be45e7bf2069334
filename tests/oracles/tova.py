"""TOVA in NumPy, float64, from its paper (arXiv 2401.06104, section 3.2): one sequence, one token at a time."""

from __future__ import annotations

import numpy as np

from tests.oracles.online import softmax


def tova(q, k, v, n: int, budget: int, keep_newest: bool = False, window: int | None = None):
    """Decodes q [K G S H], k, v [K S H], a prompt of n tokens -> (outputs [K G S-n H] of the rest, cached tokens).

    Over budget the token with the lowest weight, in the mean over all K * G query heads, is evicted; a prompt is cut at
    once.
    """
    K, G, S, H = q.shape
    cached: list[int] = []
    out = np.empty((K, G, S - n, H))
    for t in range(S):
        cached.append(t)
        if t < n - 1:
            continue
        keys = np.array(cached)
        hidden = np.zeros(len(cached), bool) if window is None else keys <= t - window
        weight = np.zeros(len(cached))
        for head in range(K):
            p = softmax(np.where(hidden, -np.inf, q[head, :, t] @ k[head, keys].T / np.sqrt(H)))
            weight += p.sum(0) / (K * G)
            if t >= n:
                out[head, :, t - n] = p @ v[head, keys]
        if keep_newest:
            weight[-1] = np.inf
        order = sorted(range(len(cached)), key=lambda i: (weight[i], cached[i]))
        cached = sorted(cached[i] for i in order[max(len(cached) - budget, 0) :])
    return out, cached
