"""Keyformer in NumPy, float64, from its paper (arXiv 2403.09054), with given noise: one head of one sequence."""

from __future__ import annotations

import numpy as np


def softmax(s: np.ndarray) -> np.ndarray:
    """The softmax over the last axis."""
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def keyformer(q, k, v, noise, n: int, budget: int, recent: int, tau: float, tau_end: float, steps: int, window=None):
    """Decodes q [G S H], k, v [S H] with noise [G S S] of queries and keys, after a prompt of n tokens.

    Returns (outputs [G S-n H] of the tokens after the prompt, the tokens cached at the end).
    """
    G, S, H = q.shape
    cached: list[int] = []
    scores = np.zeros(S)
    out = np.empty((G, S - n, H))
    for t in range(S):
        cached.append(t)
        visible = [s for s in cached if window is None or s > t - window]
        logits = q[:, t] @ k[visible].T / np.sqrt(H)
        step = max(t - n + 1, 0)
        temperature = tau + (tau_end - tau) * min(step, steps) / steps
        scores[visible] += softmax((logits + noise[:, t, visible]) / temperature).sum(0)
        if t >= n:
            out[:, t - n] = softmax(logits) @ v[visible]
        while t >= n - 1 and len(cached) > budget:
            cached.remove(min((s for s in cached if s <= t - recent), key=lambda s: (scores[s], s)))
    return out, cached
