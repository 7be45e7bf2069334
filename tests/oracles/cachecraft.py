"""Cache-Craft's formulas in NumPy, from the paper (arXiv 2502.15734, section 3): one head."""

from __future__ import annotations

import math

import numpy as np


def context_impact(attention: np.ndarray, sizes: list[int], i: int) -> float:
    """The cache context impact of chunk i under causal attention weights f64[T T]."""
    ends = np.cumsum([0, *sizes])
    own = slice(ends[i], ends[i + 1])
    inter = 0.0
    for j in range(i):
        inter += attention[own, ends[j] : ends[j + 1]].sum() / (sizes[i] * sizes[j])
    intra = np.tril(attention[own, own]).sum() / sizes[i] ** 2
    return 1 / (1 + math.exp(-inter / intra))


def attention_weights(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The causal attention weights f64[T T] of q [N T H] to k [K T H], in the mean over query heads."""
    N, T, H = q.shape
    total = np.zeros((T, T))
    for n in range(N):
        s = q[n].astype(np.float64) @ k[n // (N // k.shape[0])].astype(np.float64).T / math.sqrt(H)
        s[np.triu_indices(T, 1)] = -np.inf
        weights = np.exp(s - s.max(1, keepdims=True))
        total += weights / weights.sum(1, keepdims=True)
    return total / N
