"""ChunkKV in NumPy, float64, from its paper (arXiv 2502.00299) and kvpress: one sequence, equal chunks in all heads."""

from __future__ import annotations

import numpy as np


def attention_received(q: np.ndarray, k: np.ndarray, window: int) -> np.ndarray:
    """The attention [S] that tokens receive from the last `window` queries, summed over these and all heads."""
    K, G, S, H = q.shape
    out = np.zeros(S)
    for head in range(K):
        for g in range(G):
            for t in range(max(S - window, 0), S):
                s = k[head, : t + 1] @ q[head, g, t] / np.sqrt(H)
                weights = np.exp(s - s.max())
                out[: t + 1] += weights / weights.sum()
    return out


def select_tokens(scores: np.ndarray, budget: int, chunk: int, window: int) -> list[int]:
    """Selects the window, the remainder before it that is no whole chunk, and the best chunks within the budget."""
    n = len(scores)
    if n <= budget:
        return list(range(n))
    num_chunks = (n - window) // chunk
    always = range(num_chunks * chunk, n)
    chunk_scores = [scores[i * chunk : (i + 1) * chunk].sum() for i in range(num_chunks)]
    best = sorted(range(num_chunks), key=lambda i: -chunk_scores[i])[: (budget - len(always)) // chunk]
    return sorted([*always, *(t for i in best for t in range(i * chunk, (i + 1) * chunk))])
