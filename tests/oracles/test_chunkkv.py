"""ChunkKV against its oracle, on ragged sequences.

ChunkKV in NumPy, float64, from its paper (arXiv 2502.00299) and kvpress: one sequence, equal chunks in all heads.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract import layer


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


@pytest.mark.parametrize("padding", [0.0, np.inf])
@pytest.mark.parametrize(("budget", "chunk", "window"), [(6, 2, 2), (7, 3, 1)])
def test_all_heads_keep_the_same_best_chunks(padding, budget, chunk, window):
    batch = layer.random_batch(3)
    positions = layer.prefill(layer.bind(f"chunkkv:budget={budget},chunk={chunk},window={window}"), batch, padding).pos
    assert positions.shape[1] == 1
    for b, n in enumerate(batch.lengths.tolist()):
        q, k = (np.asarray(x[b, ..., :n, :], np.float64) for x in (batch.q, batch.k))
        expected = select_tokens(attention_received(q, k, window), budget, chunk, window)
        assert sorted(p for p in positions[b, 0].tolist() if p >= 0) == expected


def test_the_best_chunk_by_hand():
    """Nine tokens with a window of one: whole chunks sum to 3, 5 and 4, and the remainder always stays."""
    score = np.array([1.0, 2.0, 5.0, 0.0, 2.0, 2.0, 0.0, 9.0])
    assert select_tokens(score, 5, 2, 1) == [2, 3, 6, 7]
    assert select_tokens(score, 6, 2, 1) == [2, 3, 4, 5, 6, 7]
