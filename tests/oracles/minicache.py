"""MiniCache in NumPy, float64, from its paper (arXiv 2405.14366): one head of one sequence at a time."""

from __future__ import annotations

from math import ceil

import numpy as np


def angle(a, b) -> float:
    """The angle between two vectors."""
    return float(np.arccos(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1)))


def interpolate_directions(a, b, t: float) -> np.ndarray:
    """The unit vector at the fraction t of the rotation from the direction of a to that of b."""
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    orthogonal = b - (a @ b) * a
    rotation = t * angle(a, b)
    return np.cos(rotation) * a + np.sin(rotation) * orthogonal / np.linalg.norm(orthogonal)


def retained_tokens(lower, upper, fraction: float) -> list[int]:
    """The tokens whose keys [T H] differ most in direction, ascending; ties go to the earlier token."""
    order = sorted(range(len(lower)), key=lambda i: (-angle(lower[i], upper[i]), i))
    return sorted(order[: ceil(fraction * len(lower) - 1e-9)])


def merge_tokens(lower, upper, retained, t: float) -> tuple[np.ndarray, np.ndarray]:
    """Merges the directions of one head's keys or values [T H] in both layers, and restores their norms."""
    below, above = lower.astype(float).copy(), upper.astype(float).copy()
    for i in set(range(len(lower))) - set(retained):
        direction = interpolate_directions(below[i], above[i], t)
        below[i], above[i] = (np.linalg.norm(x[i]) * direction for x in (below, above))
    return below, above


def merge_layers(lower, upper, fraction: float, t: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Merges (keys, values) [T H] of a head in the lower and the upper layer -> both, as the cache returns them."""
    retained = retained_tokens(lower[0], upper[0], fraction)
    keys, values = (merge_tokens(a, b, retained, t) for a, b in zip(lower, upper, strict=True))
    return list(zip(keys, values, strict=True))
