"""Attention over the keys and values that an oracle of a codec reconstructs, in NumPy, head by head."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvjax.testing import dense_attention
from tests.contract import layer

Reconstruct = Callable[[np.ndarray, int], np.ndarray]
"""Takes (the tokens of one head [n H] in float64, the number of prompt tokens), returns the stored tokens [n H]."""


def attend_decoded(batch: layer.SequenceBatch, keys: Reconstruct, values: Reconstruct) -> np.ndarray:
    """Runs all decode steps, each over the stored tokens once its own one is written -> f64[B K G STEPS H]."""
    out = np.zeros((len(batch.lengths), layer.K, layer.G, layer.STEPS, layer.H))
    for b, n in enumerate(map(int, batch.lengths)):
        for h in range(layer.K):
            for t in range(layer.STEPS):
                k, v = (np.asarray(x[b, h, : n + t + 1], np.float64) for x in (batch.k, batch.v))
                q = np.asarray(batch.q[b, h, :, n + t : n + t + 1])
                pos = np.array([n + t])
                out[b, h, :, t] = dense_attention(q, keys(k, n)[None], values(v, n)[None], pos)[:, 0]
    return out
