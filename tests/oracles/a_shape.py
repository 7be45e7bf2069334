"""A-shape prompt attention in NumPy, float64 (arXiv 2407.02490, section 3): one sequence, query by query."""

from __future__ import annotations

import numpy as np


def visible_tokens(t: int, sinks: int, recent: int) -> list[int]:
    """The positions that the query at t reads."""
    return sorted(set(range(min(sinks, t + 1))) | set(range(max(t - recent + 1, 0), t + 1)))


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: int, recent: int) -> np.ndarray:
    """Attends under the pattern: q [K G T H], k, v [K T H] -> [K G T H]."""
    out = np.empty(q.shape)
    for t in range(q.shape[2]):
        visible = visible_tokens(t, sinks, recent)
        logits = np.einsum("kgh,ksh->kgs", q[:, :, t], k[:, visible]) / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[:, :, t] = np.einsum("kgs,ksh->kgh", weights / weights.sum(-1, keepdims=True), v[:, visible])
    return out
