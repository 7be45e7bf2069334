"""KVzip in NumPy, float64, from kvpress and its paper (2505.23416): one row, one key/value head, one piece."""

from __future__ import annotations

import numpy as np


def chunk_scores(
    q: np.ndarray,
    prompt: np.ndarray,
    replay_keys: np.ndarray,
    start: int,
    end: int,
    sinks: int,
    output_norms: np.ndarray | None = None,
    hidden_norms: np.ndarray | None = None,
) -> np.ndarray:
    """q [G P H], prompt keys [S H], the repetition's own keys [P H] -> [end - start]: scores of tokens start..end-1.

    reach [G end-start] and asking [P]: norms of what values add to the output, and of hidden states (KVzip+).
    """
    G, P, H = q.shape
    num_sinks = min(sinks, start)
    scores = np.zeros(end - start)
    for g in range(G):
        for t in range(P):
            keys = np.concatenate([prompt[:num_sinks], prompt[start:end], replay_keys[: t + 1]])
            logits = keys @ q[g, t] / np.sqrt(H)
            weights = np.exp(logits - logits.max())
            weights = (weights / weights.sum())[num_sinks : num_sinks + end - start]
            if output_norms is not None:
                weights = weights * output_norms[g] / hidden_norms[t]
            scores = np.maximum(scores, weights)
    return scores
