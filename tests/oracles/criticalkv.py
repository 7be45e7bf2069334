"""CriticalKV in NumPy, one head at a time, from the two stages of the paper (arXiv 2502.03805) and kvpress' class."""

from __future__ import annotations

import numpy as np


def projected_norms(v, output) -> np.ndarray:
    """Values [T H] and the output projections of their query heads [G H D] -> mean over G of |v W|_1, [T]."""
    return np.mean([np.abs(v @ w).sum(-1) for w in output], 0)


def select_tokens(scores, norms, budget: int, always=(), fraction: float = 0.5) -> list[int]:
    """`keep` of a head's tokens: those of `always`, then by score until a share is full, then by (score + 1e-4) c."""
    candidates = [t for t in range(len(scores)) if t not in always]
    num_by_score = max(int(fraction * budget) - len(always), 0)
    chosen = sorted(candidates, key=lambda t: (-scores[t], t))[:num_by_score]
    others = sorted((t for t in candidates if t not in chosen), key=lambda t: (-(scores[t] + 1e-4) * norms[t], t))
    return sorted([*always, *chosen, *others[: budget - len(always) - num_by_score]])
