"""Attention-Gate in NumPy, float64, one sequence at a time (arXiv 2410.12876); weights are shaped as in the table."""

from __future__ import annotations

import numpy as np


def gate_logits(x, query, key, value, output, bias) -> np.ndarray:
    """The logits of the heads' gates [K T] for hidden states [T D]."""
    A, _, C = query.shape
    out = np.tile(np.asarray(bias, np.float64)[:, None], (1, len(x)))
    for a in range(A):
        for t in range(len(x)):
            weights = np.array([(x[t] @ query[a]) @ (x[s] @ key[a]) / np.sqrt(C) for s in range(len(x))])
            weights = np.exp(weights - weights.max())
            mixed = sum(p * (x[s] @ value[a]) for s, p in enumerate(weights / weights.sum()))
            out[:, t] += mixed @ output[a]
    return out


def select_tokens(scores, threshold, budget, sinks, recent) -> list[list[int]]:
    """Selects by logits [K T] the sinks and recent tokens of each head, and the best flagged tokens of all heads."""
    K, n = scores.shape
    if n <= sinks + recent:
        return [list(range(n))] * K
    free = range(sinks, n - recent)
    num_flagged = K * (min(budget, n) - sinks - recent)
    flagged = [(-scores[h, t], t, h) for h in range(K) for t in free if 1 / (1 + np.exp(-scores[h, t])) > threshold]
    best = sorted(flagged)[:num_flagged]
    ends = [*range(sinks), *range(n - recent, n)]
    return [sorted(ends + [t for _, t, head in best if head == h]) for h in range(K)]


def fit_discriminant(x, is_kept, ridge: float) -> tuple[np.ndarray, float]:
    """Fits vectors [n D] with a mask of the first class -> direction and offset of that class's logit."""
    kept_mean, evicted_mean = x[is_kept].mean(0), x[~is_kept].mean(0)
    centered = np.concatenate([x[is_kept] - kept_mean, x[~is_kept] - evicted_mean])
    covariance = centered.T @ centered / len(x)
    covariance += np.eye(len(kept_mean)) * np.trace(covariance) / len(kept_mean) / ridge
    direction = np.linalg.inv(covariance) @ (kept_mean - evicted_mean)
    return direction, np.log(is_kept.sum() / (~is_kept).sum()) - direction @ (kept_mean + evicted_mean) / 2
