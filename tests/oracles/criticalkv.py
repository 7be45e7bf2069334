"""CriticalKV in NumPy, one head at a time, from the two stages of the paper (arXiv 2502.03805) and kvpress' class."""

from __future__ import annotations

import numpy as np


def projected_norms(v, output) -> np.ndarray:
    """The mean over G of |v W|_1, [T], for values [T H] and the output projections of their query heads [G H D]."""
    return np.mean([np.abs(v @ w).sum(-1) for w in output], 0)


def select_tokens(scores, norms, budget: int, always=(), fraction: float = 0.5) -> list[int]:
    """Selects `budget` tokens of a head.

    The tokens of `always` come first, then the best by score up to `fraction` of the budget, then the best by
    (score + 1e-4) times their norm.
    """
    candidates = [t for t in range(len(scores)) if t not in always]
    num_by_score = max(int(fraction * budget) - len(always), 0)
    chosen = sorted(candidates, key=lambda t: (-scores[t], t))[:num_by_score]
    others = sorted((t for t in candidates if t not in chosen), key=lambda t: (-(scores[t] + 1e-4) * norms[t], t))
    return sorted([*always, *chosen, *others[: budget - len(always) - num_by_score]])
