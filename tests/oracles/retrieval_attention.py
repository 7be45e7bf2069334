"""RetrievalAttention with exact search in NumPy, float64 (arXiv 2409.10516, section 3): one sequence, by queries."""

from __future__ import annotations

import numpy as np

from tests.oracles.online import softmax


def retrieval_attention(q, k, v, n: int, topk: int, sinks: int, recent: int, window: int | None = None) -> np.ndarray:
    """Decodes q [K G S H], k, v [K S H] of one sequence, a prompt of n tokens -> outputs [K G S-n H] of the rest.

    A query head reads the first `sinks` tokens, the last `recent` ones, and the `topk` nearest keys of the others.
    """
    K, G, S, H = q.shape
    out = np.empty((K, G, S - n, H))
    for t in range(n, S):
        tokens = [s for s in range(t + 1) if window is None or s > t - window]
        static = [s for s in tokens if s < sinks or s > t - recent]
        others = np.array([s for s in tokens if s not in static], int)
        for h in range(K):
            for g in range(G):
                logits = k[h] @ q[h, g, t] / np.sqrt(H)
                visible = static + list(others[np.argsort(-logits[others], kind="stable")[:topk]])
                out[h, g, t - n] = softmax(logits[visible]) @ v[h, visible]
    return out
