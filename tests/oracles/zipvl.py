"""ZipVL in NumPy, float64, from its paper (2410.08584): how many tokens of a row are important in a layer."""

from __future__ import annotations

from math import ceil, floor

import numpy as np


def num_covering_tokens(received: np.ndarray, tau: float) -> int:
    """Attention received [n] -> the fewest tokens that have tau of it."""
    total, count = 0.0, 0
    for x in sorted(received, reverse=True):
        if total >= tau * received.sum():
            break
        total, count = total + x, count + 1
    return count


def num_important(attention: np.ndarray, probes: list[int], tau: float, least: float = 0.0, most: float = 1.0) -> int:
    """Attention [K G T T] of all prompt queries, and the probes among them."""
    count, n = num_covering_tokens(attention[:, :, probes].sum(2).mean((0, 1)), tau), attention.shape[3]
    return min(max(count, floor(least * n + 1e-9)), ceil(most * n - 1e-9))
