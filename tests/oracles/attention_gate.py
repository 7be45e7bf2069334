"""Attention-Gate in NumPy, float64, one row at a time, from its formula (arXiv 2410.12876); weights as in the table."""

from __future__ import annotations

import numpy as np


def logits(x, query, key, value, output, bias) -> np.ndarray:
    """Hidden states [T D] -> the logits of the heads' gates [K T]."""
    A, _, C = query.shape
    out = np.tile(np.asarray(bias, np.float64)[:, None], (1, len(x)))
    for a in range(A):
        for t in range(len(x)):
            pays = np.array([(x[t] @ query[a]) @ (x[s] @ key[a]) / np.sqrt(C) for s in range(len(x))])
            pays = np.exp(pays - pays.max())
            mixed = sum(p * (x[s] @ value[a]) for s, p in enumerate(pays / pays.sum()))
            out[:, t] += mixed @ output[a]
    return out


def kept(scores, threshold, budget, sinks, recent) -> list[list[int]]:
    """Logits [K T] -> the tokens that each head keeps: both ends, and of the flagged ones the best of all heads."""
    K, n = scores.shape
    if n <= sinks + recent:
        return [list(range(n))] * K
    free = range(sinks, n - recent)
    room = K * (min(budget, n) - sinks - recent)
    flagged = [(-scores[h, t], t, h) for h in range(K) for t in free if 1 / (1 + np.exp(-scores[h, t])) > threshold]
    best = sorted(flagged)[:room]
    ends = [*range(sinks), *range(n - recent, n)]
    return [sorted(ends + [t for _, t, head in best if head == h]) for h in range(K)]


def discriminant(x, stays, ridge: float) -> tuple[np.ndarray, float]:
    """Vectors [n D], and which of them are of the first class -> direction and offset of the logit of that class."""
    a, b = x[stays].mean(0), x[~stays].mean(0)
    apart = np.concatenate([x[stays] - a, x[~stays] - b])
    within = apart.T @ apart / len(x)
    within += np.eye(len(a)) * np.trace(within) / len(a) / ridge
    direction = np.linalg.inv(within) @ (a - b)
    return direction, np.log(stays.sum() / (~stays).sum()) - direction @ (a + b) / 2
