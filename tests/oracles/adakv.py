"""AdaKV in NumPy, one row at a time, from the paper's Algorithm 1 and kvpress' description of its variant."""

from __future__ import annotations

from fractions import Fraction

import numpy as np


def won(scores, quota: int, first=()) -> list[int]:
    """Scores [K][U] -> how many of the K * quota best (head, unit) each head has.

    Those of `first` come before all others; of equals the earlier unit, then the lower head.
    """
    everything = [(h, u) for h in range(len(scores)) for u in range(len(scores[h]))]
    everything.sort(key=lambda x: (x not in first, -scores[x[0]][x[1]], x[1], x[0]))
    best = everything[: len(scores) * quota]
    return [sum(h == head for h, _ in best) for head in range(len(scores))]


def budgets(scores, quota: int, alpha: str = "0.2") -> list[int]:
    """(1 - alpha) of what each head won and alpha of the mean, in whole units by largest remainder."""
    share = Fraction(alpha)
    exact = [(1 - share) * c + share * quota for c in won(scores, quota)]
    parts = [int(x) for x in exact]
    order = sorted(range(len(parts)), key=lambda h: (parts[h] - exact[h], h))
    for h in order[: len(parts) * quota - sum(parts)]:
        parts[h] += 1
    return parts


def kvpress(scores, quota: int, beside: int, alpha: str = "0.2") -> list[int]:
    """Of the `quota + beside` tokens of a head in the mean, int(alpha * n) are safe, its protected ones first."""
    safe = max(int(Fraction(alpha) * (quota + beside)) - beside, 0)
    first = set()
    for h, row in enumerate(scores):
        order = sorted(range(len(row)), key=lambda u, row=row: (-row[u], u))
        first |= {(h, u) for u in order[:safe]}
    return won(scores, quota, first)


def attend(q, k, v, kept, t: int, n: int, window: int | None = None) -> np.ndarray:
    """q [G H] at position t over k, v [S H]: of the n prompt tokens only those kept are seen, all later ones are."""
    seen = [s for s in range(t + 1) if (s >= n or s in kept) and (window is None or s > t - window)]
    s = q.astype(np.float64) @ k[seen].T.astype(np.float64) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v[seen].astype(np.float64)
