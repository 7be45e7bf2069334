"""CAKE in NumPy, one sequence and layer at a time, from its paper (arXiv 2503.12491) and its public code's rounding."""

from __future__ import annotations

import numpy as np

from tests.oracles.eviction import pool_scores


def preference(attention, tau1: float = 1.6, tau2: float = 0.6) -> float:
    """Combines dispersion and shift of the window's attention to the tokens before it, [heads W past]."""
    dispersion = -(attention * np.log(attention + 1e-10)).sum()
    shift = attention.var(1, ddof=1).sum()
    return float(dispersion ** (1 / tau1) * shift ** (1 / tau2))


def scores(attention, kernel: int = 5, gamma: float = 200.0) -> np.ndarray:
    """The scores of the tokens before the window, from the attention [G W past] of one key/value head."""
    head_scores = attention.mean(1) + gamma * attention.var(1, ddof=1)
    return np.mean([pool_scores(values, kernel, "avg") for values in head_scores], 0)


def spread_equally(parts: list[int], amount: int, least: int, most: int) -> list[int]:
    """Adds `amount` to the parts that are not at their limit, in equal steps; the remainder goes to the first ones."""
    parts = list(parts)
    while amount:
        free = [i for i, x in enumerate(parts) if (x < most if amount > 0 else x > least)]
        step, remainder = divmod(abs(amount), len(free))
        for rank, i in enumerate(free):
            change = step + (rank < remainder)
            change = min(change, most - parts[i]) if amount > 0 else -min(change, parts[i] - least)
            parts[i], amount = parts[i] + change, amount - change
            if not amount:
                break
    return parts


def budgets(preferences: list[float], total: int, most: int) -> list[int]:
    """Budgets of the layers without the window: at least one token and at most `most` each, `total` in all."""
    total_preference = sum(preferences)
    fractions = [x / total_preference if total_preference else 1 / len(preferences) for x in preferences]
    parts = [int(x * total) for x in fractions]
    excess = sum(max(x - most, 0) for x in parts)
    parts = spread_equally([min(x, most) for x in parts], excess, 0, most)
    parts = [max(x, 1) for x in parts]
    return spread_equally(parts, total - sum(parts), 1, most)
