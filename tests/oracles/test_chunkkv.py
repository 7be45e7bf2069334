"""ChunkKV against its oracle, on ragged sequences."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract import layer
from tests.oracles import chunkkv as oracle


@pytest.mark.parametrize("padding", [0.0, np.inf])
@pytest.mark.parametrize(("budget", "chunk", "window"), [(6, 2, 2), (7, 3, 1)])
def test_all_heads_keep_the_same_best_chunks(padding, budget, chunk, window):
    batch = layer.random_batch(3)
    positions = layer.prefill(layer.bind(f"chunkkv:budget={budget},chunk={chunk},window={window}"), batch, padding).pos
    assert positions.shape[1] == 1
    for b, n in enumerate(batch.lengths.tolist()):
        q, k = (np.asarray(x[b, ..., :n, :], np.float64) for x in (batch.q, batch.k))
        expected = oracle.select_tokens(oracle.attention_received(q, k, window), budget, chunk, window)
        assert sorted(p for p in positions[b, 0].tolist() if p >= 0) == expected


def test_the_best_chunk_by_hand():
    """Nine tokens with a window of one: whole chunks sum to 3, 5 and 4, and the remainder always stays."""
    score = np.array([1.0, 2.0, 5.0, 0.0, 2.0, 2.0, 0.0, 9.0])
    assert oracle.select_tokens(score, 5, 2, 1) == [2, 3, 6, 7]
    assert oracle.select_tokens(score, 6, 2, 1) == [2, 3, 4, 5, 6, 7]
