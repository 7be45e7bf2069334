"""CAKE in NumPy, one row and one layer at a time, from the paper's formulas and its public code's rule of integers."""

from __future__ import annotations

import numpy as np

from tests.oracles.eviction import pooled


def preference(a, tau1: float = 1.6, tau2: float = 0.6) -> float:
    """Attention of the window's queries to the tokens before it, [heads W past] -> dispersion and shift as one."""
    dispersion = -(a * np.log(a + 1e-10)).sum()
    shift = a.var(1, ddof=1).sum()
    return float(dispersion ** (1 / tau1) * shift ** (1 / tau2))


def scores(a, kernel: int = 5, gamma: float = 200.0) -> np.ndarray:
    """Attention of one key/value head's query heads, [G W past] -> what its tokens before the window score."""
    each = a.mean(1) + gamma * a.var(1, ddof=1)
    return np.mean([pooled(row, kernel, "avg") for row in each], 0)


def equal_steps(parts: list[int], amount: int, least: int, most: int) -> list[int]:
    """Gives `amount` to the parts that are not at their bound, in equal parts, the remainder to the first ones."""
    parts = list(parts)
    while amount:
        free = [i for i, x in enumerate(parts) if (x < most if amount > 0 else x > least)]
        each, left = divmod(abs(amount), len(free))
        for rank, i in enumerate(free):
            by = each + (rank < left)
            by = min(by, most - parts[i]) if amount > 0 else -min(by, parts[i] - least)
            parts[i], amount = parts[i] + by, amount - by
            if not amount:
                break
    return parts


def budgets(preferences: list[float], total: int, most: int) -> list[int]:
    """Tokens of each layer beside the window, at least one each; `total` of all layers, `most` that a layer has."""
    whole = sum(preferences)
    shares = [x / whole if whole else 1 / len(preferences) for x in preferences]
    parts = [int(x * total) for x in shares]
    excess = sum(max(x - most, 0) for x in parts)
    parts = equal_steps([min(x, most) for x in parts], excess, 0, most)
    parts = [max(x, 1) for x in parts]
    return equal_steps(parts, total - sum(parts), 1, most)
