"""ThinK in NumPy, float64, from its paper (2407.21018, section 3) and its authors' code: one head of one row."""

from __future__ import annotations

from math import floor

import numpy as np


def select_channels(q: np.ndarray, k: np.ndarray, fraction: float, num_queries: int) -> list[int]:
    """Queries q [G n H] and keys k [S H] of a prompt -> the channels that stay, ascending; of equal ones the lower."""
    scores = np.square(q[:, -num_queries:]).mean((0, 1)) * np.square(k).mean(0)
    order = sorted(range(len(scores)), key=lambda c: (-scores[c], c))
    return sorted(order[: len(scores) - floor(fraction * len(scores) + 1e-9)])


def reconstruct(k: np.ndarray, num_pruned: int, channels: list[int]) -> np.ndarray:
    """Keys k [n H], of which the `older` first have only some channels."""
    out = k.astype(float).copy()
    dropped = [c for c in range(k.shape[1]) if c not in set(channels)]
    out[:num_pruned, dropped] = 0.0
    return out
