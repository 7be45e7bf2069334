"""KVzip in NumPy, float64, from kvpress and its paper (2505.23416): one row, one key/value head, one piece."""

from __future__ import annotations

import numpy as np


def piece(
    q: np.ndarray,
    prompt: np.ndarray,
    own: np.ndarray,
    start: int,
    end: int,
    sinks: int,
    reach: np.ndarray | None = None,
    asking: np.ndarray | None = None,
) -> np.ndarray:
    """q [G P H], prompt keys [S H], the repetition's own keys [P H] -> [end - start]: scores of tokens start..end-1.

    reach [G end-start] and asking [P]: norms of what values add to the output, and of hidden states (KVzip+).
    """
    G, P, H = q.shape
    first = min(sinks, start)
    best = np.zeros(end - start)
    for g in range(G):
        for t in range(P):
            keys = np.concatenate([prompt[:first], prompt[start:end], own[: t + 1]])
            s = keys @ q[g, t] / np.sqrt(H)
            p = np.exp(s - s.max())
            p = (p / p.sum())[first : first + end - start]
            if reach is not None:
                p = p * reach[g] / asking[t]
            best = np.maximum(best, p)
    return best
