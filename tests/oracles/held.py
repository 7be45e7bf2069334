"""Attention to whatever a codec holds, in NumPy: each head by itself, over keys and values that an oracle gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvjax.testing import dense_attention
from tests.contract import layer

Hold = Callable[[np.ndarray, int], np.ndarray]
"""(the tokens of one head [n H], float64; how many of them were the prompt) -> what is held of them, [n H]."""


def attended(d: layer.SequenceBatch, keys: Hold, values: Hold) -> np.ndarray:
    """All decode steps, each over what is held when it has written its own token: f64[B K G STEPS H]."""
    out = np.zeros((len(d.lengths), layer.K, layer.G, layer.STEPS, layer.H))
    for b, n in enumerate(map(int, d.lengths)):
        for h in range(layer.K):
            for t in range(layer.STEPS):
                k, v = (np.asarray(x[b, h, : n + t + 1], np.float64) for x in (d.k, d.v))
                q = np.asarray(d.q[b, h, :, n + t : n + t + 1])
                at = np.array([n + t])
                out[b, h, :, t] = dense_attention(q, keys(k, n)[None], values(v, n)[None], at)[:, 0]
    return out
