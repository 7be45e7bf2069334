"""AdaKV in NumPy, one sequence at a time, from its paper (arXiv 2407.11550, Algorithm 1) and kvpress' variant of it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np


def num_won(scores, quota: int, protected=()) -> list[int]:
    """Scores [K][U] -> the number of units of each head among the K * quota best of all heads.

    Protected units come before all others. Ties go to the earlier unit, then to the lower head.
    """
    ranking = [(h, u) for h in range(len(scores)) for u in range(len(scores[h]))]
    ranking.sort(key=lambda x: (x not in protected, -scores[x[0]][x[1]], x[1], x[0]))
    best = ranking[: len(scores) * quota]
    return [sum(h == head for h, _ in best) for head in range(len(scores))]


def budgets(scores, quota: int, alpha: str = "0.2") -> list[int]:
    """Mixes (1 - alpha) of each head's won units with alpha of the mean, in whole units by largest remainder."""
    safe_fraction = Fraction(alpha)
    targets = [(1 - safe_fraction) * c + safe_fraction * quota for c in num_won(scores, quota)]
    counts = [int(x) for x in targets]
    order = sorted(range(len(counts)), key=lambda h: (counts[h] - targets[h], h))
    for h in order[: len(counts) * quota - sum(counts)]:
        counts[h] += 1
    return counts


def kvpress_budgets(scores, quota: int, num_always: int, alpha: str = "0.2") -> list[int]:
    """kvpress' budgets: int(alpha * (quota + num_always)) tokens of each head are safe, including those always kept."""
    safe = max(int(Fraction(alpha) * (quota + num_always)) - num_always, 0)
    protected = set()
    for h, head_scores in enumerate(scores):
        order = sorted(range(len(head_scores)), key=lambda u, head_scores=head_scores: (-head_scores[u], u))
        protected |= {(h, u) for u in order[:safe]}
    return num_won(scores, quota, protected)


def attend(q, k, v, prompt_tokens, t: int, n: int, window: int | None = None) -> np.ndarray:
    """Attends with q [G H] at position t to k, v [S H]: to these of the n prompt tokens, and to all later tokens."""
    visible = [s for s in range(t + 1) if (s >= n or s in prompt_tokens) and (window is None or s > t - window)]
    s = q.astype(np.float64) @ k[visible].T.astype(np.float64) / np.sqrt(q.shape[-1])
    weights = np.exp(s - s.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v[visible].astype(np.float64)
