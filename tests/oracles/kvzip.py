"""KVzip in NumPy, float64, from kvpress and its paper (arXiv 2505.23416, section 3): one head and chunk."""

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
    """The scores of tokens start..end-1 from q [G P H], prompt keys [S H] and the replay's own keys [P H].

    KVzip+ adds the norms of what values add to the output, [G end-start], and the norms of hidden states, [P].
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
