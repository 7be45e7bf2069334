"""Attention to pages in NumPy, float64, from Quest (arXiv 2406.10774, Algorithm 1): one sequence, query by query."""

from __future__ import annotations

import numpy as np

from tests.oracles.online import softmax


def page_bound(q: np.ndarray, keys: np.ndarray) -> float:
    """The greatest product of q [H] with a point in the box around keys [n H]."""
    return sum(max(x * low, x * high) for x, low, high in zip(q, keys.min(0), keys.max(0), strict=True))


def attend_pages(
    q, k, v, n: int, page: int, num_pages: int, shared=False, sinks=0, recent=0, window=None
) -> np.ndarray:
    """Decodes q [K G S H], k, v [K S H] of one sequence, a prompt of n tokens -> outputs [K G S-n H] of the rest.

    A query reads its own page, the first `sinks` tokens, the last `recent` ones and the best `num_pages` earlier pages.
    With `shared` the queries of a key/value head read the same pages, by the greatest of their bounds.
    """
    K, G, S, H = q.shape
    out = np.empty((K, G, S - n, H))
    for t in range(n, S):
        start = min(t // page * page, t + 1 - recent)
        always = {s for s in range(t + 1) if s < sinks or s >= start}
        first_visible = 0 if window is None else t - window + 1
        earlier = [list(range(s, s + page)) for s in range(0, t // page * page, page)]
        earlier = [weights for weights in earlier if not set(weights) <= always and weights[-1] >= first_visible]
        for head in range(K):
            bounds = np.array([[page_bound(q[head, g, t], k[head, weights]) for weights in earlier] for g in range(G)])
            if shared and earlier:
                bounds[:] = bounds.max(0)
            for g in range(G):
                best = np.argsort(-bounds[g], kind="stable")[:num_pages]
                selected = always | {s for i in best for s in earlier[i]}
                visible = [s for s in sorted(selected) if s >= first_visible]
                weights = softmax(k[head, visible] @ q[head, g, t] / np.sqrt(H))
                out[head, g, t - n] = weights @ v[head, visible]
    return out
