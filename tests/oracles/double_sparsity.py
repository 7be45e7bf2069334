"""Double Sparsity in NumPy, float64, from paper and public code (arXiv 2408.07092): one sequence, query by query."""

from __future__ import annotations

import numpy as np

from tests.oracles.online import softmax


def label_channels(q: np.ndarray, k: np.ndarray, num_channels: int) -> np.ndarray:
    """The most important channels of a head by its prompt q [G n H], k [n H]: each query times its own token's key."""
    return np.argsort(-np.abs(q * k[None]).mean((0, 1)), kind="stable")[:num_channels]


def double_sparsity(q, k, v, n: int, heavy: int, factor: int) -> np.ndarray:
    """Decodes q [K G S H], k, v [K S H] of one sequence, a prompt of n tokens -> outputs [K G S-n H] of the rest.

    A query head reads its own token and the heavy - 1 earlier ones whose labels give the largest product.
    """
    K, G, S, H = q.shape
    out = np.empty((K, G, S - n, H))
    for h in range(K):
        channels = label_channels(q[h, :, :n], k[h, :n], H // factor)
        for g in range(G):
            for t in range(n, S):
                products = k[h, :t][:, channels] @ q[h, g, t, channels]
                visible = [*np.argsort(-products, kind="stable")[: heavy - 1], t]
                out[h, g, t - n] = softmax(k[h, visible] @ q[h, g, t] / np.sqrt(H)) @ v[h, visible]
    return out
