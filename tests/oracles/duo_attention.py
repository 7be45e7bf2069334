"""DuoAttention in NumPy: which heads stream, as its public code decides it, and what a head of each sort keeps."""

from __future__ import annotations

import numpy as np


def select_full_heads(alpha, sparsity: float) -> np.ndarray:
    """Weights [L K] without equals -> bool[L K]: those that keep all tokens (`sparsify_attention_heads`)."""
    threshold = np.quantile(alpha, sparsity)
    if sparsity >= 1:
        threshold = np.inf
    if sparsity <= 0:
        threshold = -np.inf
    return np.asarray(alpha) >= threshold


def select_tokens(n: int, is_full: bool, sinks: int, recent: int) -> list[int]:
    """The tokens of a row of n."""
    return [s for s in range(n) if is_full or s < sinks or s >= n - recent]


def untrained_head_score(q, k, rotate, num_positions: int = 500) -> float:
    """Bare queries [G T H] and keys [T H] of one head and text -> kvpress' score for untrained models.

    rotate: (vector, position) -> the vector turned there.
    """
    keys = np.stack([rotate(k.mean(0), s) for s in range(num_positions)])
    areas = []
    for group in q:
        s = keys @ rotate(group.mean(0), num_positions - 1) / np.sqrt(k.shape[1])
        p = np.exp(s - s.max())
        areas.append(np.cumsum(p / p.sum()).mean())
    return float(np.mean(areas))
