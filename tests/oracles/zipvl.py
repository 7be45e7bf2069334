"""ZipVL's number of important tokens in NumPy, float64, from its paper (arXiv 2410.08584, version 1, section 3)."""

from __future__ import annotations

from math import ceil, floor

import numpy as np


def num_covering_tokens(received: np.ndarray, tau: float) -> int:
    """The fewest tokens that receive the fraction tau of the attention [n]."""
    total, count = 0.0, 0
    for x in sorted(received, reverse=True):
        if total >= tau * received.sum():
            break
        total, count = total + x, count + 1
    return count


def num_important(attention: np.ndarray, probes: list[int], tau: float, least: float = 0.0, most: float = 1.0) -> int:
    """The number of important tokens, by the probes' part of the attention [K G T T] of all prompt queries."""
    count, n = num_covering_tokens(attention[:, :, probes].sum(2).mean((0, 1)), tau), attention.shape[3]
    return min(max(count, floor(least * n + 1e-9)), ceil(most * n - 1e-9))
