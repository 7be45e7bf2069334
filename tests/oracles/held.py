"""Attention to whatever a codec holds, in NumPy: each head by itself, over keys and values that an oracle gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvjax.testing import dense_attention
from tests.contract import layer

Reconstruct = Callable[[np.ndarray, int], np.ndarray]
"""(the tokens of one head [n H], float64; how many of them were the prompt) -> what is held of them, [n H]."""


def attend_decoded(batch: layer.SequenceBatch, keys: Reconstruct, values: Reconstruct) -> np.ndarray:
    """All decode steps, each over what is held when it has written its own token: f64[B K G STEPS H]."""
    out = np.zeros((len(batch.lengths), layer.K, layer.G, layer.STEPS, layer.H))
    for b, n in enumerate(map(int, batch.lengths)):
        for h in range(layer.K):
            for t in range(layer.STEPS):
                k, v = (np.asarray(x[b, h, : n + t + 1], np.float64) for x in (batch.k, batch.v))
                q = np.asarray(batch.q[b, h, :, n + t : n + t + 1])
                pos = np.array([n + t])
                out[b, h, :, t] = dense_attention(q, keys(k, n)[None], values(v, n)[None], pos)[:, 0]
    return out
