"""CriticalKV in NumPy, one head at a time, from the two stages of the paper (arXiv 2502.03805) and kvpress' class."""

from __future__ import annotations

import numpy as np


def reach(v, output) -> np.ndarray:
    """Values [T H] and the output projections of their query heads [G H D] -> mean over G of |v W|_1, [T]."""
    return np.mean([np.abs(v @ w).sum(-1) for w in output], 0)


def kept(score, c, keep: int, always=(), share: float = 0.5) -> list[int]:
    """`keep` of a head's tokens: those of `always`, then by score until a share is full, then by (score + 1e-4) c."""
    left = [t for t in range(len(score)) if t not in always]
    first = max(int(share * keep) - len(always), 0)
    chosen = sorted(left, key=lambda t: (-score[t], t))[:first]
    others = sorted((t for t in left if t not in chosen), key=lambda t: (-(score[t] + 1e-4) * c[t], t))
    return sorted([*always, *chosen, *others[: keep - len(always) - first]])
