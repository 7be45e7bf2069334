"""DuoAttention in NumPy (arXiv 2410.10819, section 3): full and streaming heads as its public code chooses them."""

from __future__ import annotations

import numpy as np


def select_full_heads(alpha, sparsity: float) -> np.ndarray:
    """The heads that keep all tokens, bool[L K], by distinct weights [L K] (`sparsify_attention_heads`)."""
    threshold = np.quantile(alpha, sparsity)
    if sparsity >= 1:
        threshold = np.inf
    if sparsity <= 0:
        threshold = -np.inf
    return np.asarray(alpha) >= threshold


def select_tokens(n: int, is_full: bool, sinks: int, recent: int) -> list[int]:
    """The tokens that a head keeps of n."""
    return [s for s in range(n) if is_full or s < sinks or s >= n - recent]


def untrained_head_score(q, k, rotate, num_positions: int = 500) -> float:
    """The score of kvpress for untrained models, from queries [G T H] and keys [T H] before RoPE of one head and text.

    `rotate` takes (vector, position) and returns the vector rotated to the position.
    """
    keys = np.stack([rotate(k.mean(0), s) for s in range(num_positions)])
    areas = []
    for group in q:
        s = keys @ rotate(group.mean(0), num_positions - 1) / np.sqrt(k.shape[1])
        p = np.exp(s - s.max())
        areas.append(np.cumsum(p / p.sum()).mean())
    return float(np.mean(areas))
