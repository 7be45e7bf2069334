"""ThinK in NumPy, float64, from its paper (2407.21018, section 3) and its authors' code: one head of one row."""

from __future__ import annotations

from math import floor

import numpy as np


def channels(q: np.ndarray, k: np.ndarray, share: float, queries: int) -> list[int]:
    """Queries q [G n H] and keys k [S H] of a prompt -> the channels that stay, ascending; of equal ones the lower."""
    score = np.square(q[:, -queries:]).mean((0, 1)) * np.square(k).mean(0)
    order = sorted(range(len(score)), key=lambda c: (-score[c], c))
    return sorted(order[: len(score) - floor(share * len(score) + 1e-9)])


def held(k: np.ndarray, older: int, stay: list[int]) -> np.ndarray:
    """Keys k [n H], of which the `older` first have only some channels."""
    out = k.astype(float).copy()
    dropped = [c for c in range(k.shape[1]) if c not in set(stay)]
    out[:older, dropped] = 0.0
    return out
