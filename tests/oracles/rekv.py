"""ReKV in NumPy, float64, from its paper (arXiv 2503.00540): one sequence, one query at a time."""

from __future__ import annotations

import numpy as np

from tests.oracles.online import rope, softmax


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of two arrays as vectors."""
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def rekv(q, k, v, n: int, topk: int, block: int, sinks: int, recent: int) -> np.ndarray:
    """Answers over a context of n tokens: q [K G S H], k, v [K S H] of one sequence after RoPE -> outputs [K G S-n H].

    A token of the question reads the first `sinks` tokens, the last `recent` ones, its own block, and `topk` earlier
    blocks whose mean key has the greatest cosine to the mean query so far; all heads form one vector without RoPE.
    """
    K, G, S, H = q.shape
    inverse_pos = -np.arange(S)
    unrotated_q, unrotated_k = rope(q, inverse_pos), rope(k, inverse_pos)
    out = np.empty((K, G, S - n, H))
    for t in range(n, S):
        mean_query = unrotated_q[:, :, n : t + 1].mean(2)
        start = min(t // block * block, t + 1 - recent)
        always = {s for s in range(t + 1) if s < sinks or s >= start}
        blocks = [list(range(s, s + block)) for s in range(0, t // block * block, block)]
        blocks = [x for x in blocks if not set(x) <= always]
        keys = [np.repeat(unrotated_k[:, x].mean(1)[:, None], G, 1) for x in blocks]
        best = np.argsort([-cosine(mean_query, key) for key in keys], kind="stable")[:topk]
        visible = sorted(always | {s for i in best for s in blocks[i]})
        for h in range(K):
            for g in range(G):
                out[h, g, t - n] = softmax(k[h, visible] @ q[h, g, t] / np.sqrt(H)) @ v[h, visible]
    return out
