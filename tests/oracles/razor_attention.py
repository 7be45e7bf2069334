"""RazorAttention in NumPy (arXiv 2407.15891, section 3): retrieval heads, and attention with a compensation token."""

from __future__ import annotations

import numpy as np


def echo_and_induction(a, period: int) -> tuple[float, float]:
    """The scores (echo, induction), as in msmodelslim, of one query head's attention [T T] to a text that repeats."""
    echo, induction = [], []
    for t in range(len(a)):
        for s in range(t - period, -1, -period):
            echo.append(a[t, s])
            induction.append(a[t, s + 1])
    return float(np.mean(echo)), float(np.mean(induction))


def select_retrieval_heads(echo, induction, echo_fraction: float, induction_fraction: float) -> np.ndarray:
    """The retrieval heads, bool[L K], by distinct scores [L K]."""
    is_retrieval = np.zeros(np.shape(echo), bool)
    for scores, fraction in ((echo, echo_fraction), (induction, induction_fraction)):
        order = np.argsort(-np.asarray(scores), axis=None)
        is_retrieval.ravel()[order[: round(fraction * is_retrieval.size)]] = True
    return is_retrieval


def split_prompt(n: int, sinks: int, recent: int, part: int) -> tuple[list[int], list[int]]:
    """Splits n tokens -> (sinks and recent tokens, tokens between them that become one compensation token)."""
    last = max(recent, n // part if part else 0)
    between = list(range(sinks, n - last))
    return [s for s in range(n) if s not in between], between


def attend(q, k, v, exact, compensated, later) -> np.ndarray:
    """Attends with q [G H] to exact and later tokens, and to the compensation token, weighted by its count -> [G H]."""
    visible = [*exact, *later]
    keys, values, count = k[visible], v[visible], np.ones(len(visible))
    if compensated:
        keys = np.vstack([keys, k[compensated].mean(0)])
        values = np.vstack([values, v[compensated].mean(0)])
        count = np.append(count, len(compensated))
    s = q @ keys.T / np.sqrt(q.shape[-1])
    weights = count * np.exp(s - s.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values
