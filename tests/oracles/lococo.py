"""LoCoCo in NumPy, float64, one head at a time, from its public code (VITA-Group/LoCoCo; arXiv 2406.05317)."""

from __future__ import annotations

import numpy as np

from tests.oracles.eviction import top_indices


def mixing_weights(x, weight, bias) -> np.ndarray:
    """The softmax weights [M T] of tokens [T C] under a convolution [M C w] with zero padding."""
    M, _, w = weight.shape
    out = np.zeros((M, len(x)))
    for m in range(M):
        for t in range(len(x)):
            for i in range(w):
                s = t + i - w // 2
                if 0 <= s < len(x):
                    out[m, t] += weight[m, :, i] @ x[s]
            out[m, t] = max(out[m, t] + bias[m], 0)
        out[m] = np.exp(out[m] - out[m].max())
    return out / out.sum(1, keepdims=True)


def compress(k, v, scores, budget, recent, weight, bias, normalizer):
    """Compresses keys and values [T H] by scores [T] -> (tokens that keep their slots, keys, values [budget H])."""
    T, M = len(k), len(weight)
    if budget >= T:
        return list(range(T)), k, v
    newest = set(range(T - recent, T))
    heavy = newest | set(top_indices(scores.tolist(), budget - M - recent, newest))
    others = [t for t in range(T) if t not in heavy]
    weights = mixing_weights(np.concatenate([k, v], 1)[others], weight, bias)
    anchors = top_indices(scores.tolist(), M, heavy)
    new_k, new_v = k.copy(), v.copy()
    for m, t in enumerate(anchors):
        new_k[t] = (1 - normalizer) * k[t] + normalizer * weights[m] @ k[others]
        new_v[t] = (1 - normalizer) * v[t] + normalizer * weights[m] @ v[others]
    tokens = sorted(heavy | set(anchors))
    return tokens, new_k[tokens], new_v[tokens]
