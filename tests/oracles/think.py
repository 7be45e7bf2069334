"""ThinK in NumPy, float64, from its paper (arXiv 2407.21018, section 3) and authors' code: one head of one sequence."""

from __future__ import annotations

from math import floor

import numpy as np


def select_channels(q: np.ndarray, k: np.ndarray, fraction: float, num_queries: int) -> list[int]:
    """Selects the key channels that stay, ascending, by q [G n H] and k [S H] of a prompt; ties go to the lower."""
    scores = np.square(q[:, -num_queries:]).mean((0, 1)) * np.square(k).mean(0)
    order = sorted(range(len(scores)), key=lambda c: (-scores[c], c))
    return sorted(order[: len(scores) - floor(fraction * len(scores) + 1e-9)])


def reconstruct(k: np.ndarray, num_pruned: int, channels: list[int]) -> np.ndarray:
    """The stored keys [n H] when the first `num_pruned` have only these channels."""
    out = k.astype(float).copy()
    dropped = [c for c in range(k.shape[1]) if c not in set(channels)]
    out[:num_pruned, dropped] = 0.0
    return out
