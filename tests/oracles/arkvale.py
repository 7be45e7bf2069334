"""ArkVale in NumPy, float64, from its paper (Chen et al., NeurIPS 2024): one sequence, one query at a time."""

from __future__ import annotations

import numpy as np

from tests.oracles.online import softmax


def page_box(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lower and upper corner [H] of the box of a full page of keys [page H]."""
    center = (keys.max(0) + keys.min(0)) / 2
    radius = np.abs(center - keys).mean(0)
    return center - radius, center + radius


def max_product(q: np.ndarray, keys: np.ndarray) -> float:
    """The greatest product of q [H] with a point in the page's box."""
    low, high = page_box(keys)
    return np.maximum(q * low, q * high).sum()


def arkvale(q, k, v, n: int, page: int, num_recalled: int, sinks: int, recent: int) -> np.ndarray:
    """Decodes q [K G S H], k, v [K S H] of one sequence, a prompt of n tokens -> outputs [K G S-n H] of the rest.

    A query reads the first `sinks` tokens, the last `recent` ones, its own page, and `num_recalled` pages between them.
    All heads share these pages; their `max_product` is highest in the mean over query heads.
    """
    K, G, S, H = q.shape
    out = np.empty((K, G, S - n, H))
    for t in range(n, S):
        start = min(t // page * page, t + 1 - recent)
        always = {s for s in range(t + 1) if s < sinks or s >= start}
        pages = [list(range(s, s + page)) for s in range(0, t // page * page, page)]
        pages = [p for p in pages if not set(p) <= always]
        bounds = [np.mean([max_product(q[h, g, t], k[h, p]) for h in range(K) for g in range(G)]) for p in pages]
        best = np.argsort(-np.array(bounds), kind="stable")[:num_recalled]
        visible = sorted(always | {s for i in best for s in pages[i]})
        for h in range(K):
            for g in range(G):
                out[h, g, t - n] = softmax(k[h, visible] @ q[h, g, t] / np.sqrt(H)) @ v[h, visible]
    return out
