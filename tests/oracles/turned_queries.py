"""Turned queries in NumPy, float64, from kvjax's own formula (`kvjax/methods/turned_queries.py`)."""

from __future__ import annotations

import numpy as np


def rotate(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Rotates the pairs (i, i + H/2) of x [n H] by positions [n] times frequencies [H/2]."""
    half = x.shape[1] // 2
    pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * positions[:, None] * frequencies)
    return np.concatenate([pairs.real, pairs.imag], 1)


def scores(
    q: np.ndarray,
    k: np.ndarray,
    frequencies: np.ndarray,
    ahead: int,
    reduce: str = "max",
    stride: int = 1,
    last: float = 1.0,
) -> np.ndarray:
    """The scores [T] of keys k [T H] by queries q [G T H], both after RoPE at positions 0..T-1."""
    T = k.shape[0]
    query_tokens = [t for t in range(T - 1, -1, -stride) if t >= T - max(int(T * last), 1)]
    head_scores = []
    for head in q:
        unrotated = rotate(head, -np.arange(T), frequencies)[query_tokens]
        moved = rotate(unrotated, np.full(len(query_tokens), T + ahead), frequencies)
        logits = moved @ k.T / np.sqrt(k.shape[1])
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        head_scores.append(weights.max(0) if reduce == "max" else weights.mean(0))
    return np.max(head_scores, 0)
