"""RazorAttention in NumPy: retrieval heads by repeated tokens, and attention with a compensation token (2407.15891)."""

from __future__ import annotations

import numpy as np


def looked_back(a, period: int) -> tuple[float, float]:
    """Attention [T T] of one query head to a text that repeats itself -> (echo, induction), as in msmodelslim."""
    echo, induction = [], []
    for t in range(len(a)):
        for s in range(t - period, -1, -period):
            echo.append(a[t, s])
            induction.append(a[t, s + 1])
    return float(np.mean(echo)), float(np.mean(induction))


def retrieval_heads(echo, induction, echo_share: float, induction_share: float) -> np.ndarray:
    """Scores [L K] without equals -> bool[L K]."""
    found = np.zeros(np.shape(echo), bool)
    for scores, share in ((echo, echo_share), (induction, induction_share)):
        order = np.argsort(-np.asarray(scores), axis=None)
        found.ravel()[order[: round(share * found.size)]] = True
    return found


def ends(n: int, sinks: int, recent: int, part: int) -> tuple[list[int], list[int]]:
    """A row of n tokens -> (first and last ones that stay, those between, of which one token is made)."""
    last = max(recent, n // part if part else 0)
    between = list(range(sinks, n - last))
    return [s for s in range(n) if s not in between], between


def attend(q, k, v, held, between, later) -> np.ndarray:
    """q [G H] over the tokens that are held, the mean of those between, so many times, and the later ones: [G H]."""
    seen = [*held, *later]
    keys, values, count = k[seen], v[seen], np.ones(len(seen))
    if between:
        keys = np.vstack([keys, k[between].mean(0)])
        values = np.vstack([values, v[between].mean(0)])
        count = np.append(count, len(between))
    s = q @ keys.T / np.sqrt(q.shape[-1])
    p = count * np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ values
