"""TriAttention in NumPy, float64, from its paper (arXiv 2604.04921): one key/value head of one sequence.

Queries q [G Q H] at positions q_pos [Q] and keys k [S H] at positions pos [S], after rotation by RoPE; `frequencies`
[H / 2] in radians per position.
"""

from __future__ import annotations

import numpy as np


def unrotate_pairs(x: np.ndarray, pos: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """The channel pairs of x [n H] as complex numbers [n H/2], without the rotation to their positions."""
    half = len(frequencies)
    return (x[:, :half] + 1j * x[:, half:]) * np.exp(-1j * np.outer(pos, frequencies))


def scores(q, q_pos, k, pos, frequencies, furthest, normalise=True) -> np.ndarray:
    """The scores [S] for a query after the newest key, at distances that double."""
    keys, now, head_scores = unrotate_pairs(k, pos, frequencies), max(pos) + 1, []
    for queries in q:
        pairs = unrotate_pairs(queries, q_pos, frequencies)
        mean, modulus = pairs.mean(0), np.abs(pairs).mean(0)
        key_scores = []
        for key, p in zip(keys, pos, strict=True):
            phase, total, ahead = np.angle(mean * key.conj()), [], 1
            while ahead <= furthest:
                trig = np.abs(mean) * np.abs(key) * np.cos((now - p + ahead) * frequencies + phase)
                total.append(np.sum(trig + (modulus - np.abs(mean)) * np.abs(key)))
                ahead *= 2
            key_scores.append(np.mean(total))
        key_scores = np.array(key_scores)
        head_scores.append((key_scores - key_scores.mean()) / max(key_scores.std(), 1e-6) if normalise else key_scores)
    return np.max(head_scores, 0)


def select_tokens(q, q_pos, k, tokens, frequencies, furthest, budget, recent) -> list[int]:
    """Selects the last `recent` tokens of k [S H] and the best of the others, ascending."""
    token_scores = scores(q, q_pos, k[tokens], np.array(tokens), frequencies, furthest)
    best = sorted(range(len(tokens) - recent), key=lambda i: -token_scores[i])[: max(budget - recent, 0)]
    return sorted([tokens[i] for i in best] + tokens[len(tokens) - recent :])


def decode(q, k, v, n: int, frequencies, furthest, budget, recent) -> np.ndarray:
    """Decodes q [G S H], k, v [S H], a prompt of n tokens -> outputs [G S-n H]; evicts to the budget before each token.

    Before a token its own query gives the statistics.
    """
    G, S, H = q.shape
    out = np.empty((G, S - n, H))
    cached = list(range(n))
    if n > budget:
        cached = select_tokens(q[:, :n], np.arange(n), k, cached, frequencies, furthest, budget, recent)
    for t in range(n, S):
        if len(cached) > budget:
            cached = select_tokens(q[:, t : t + 1], np.array([t]), k, cached, frequencies, furthest, budget, recent)
        cached = [*cached, t]
        logits = q[:, t] @ k[cached].T / np.sqrt(H)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[:, t - n] = weights / weights.sum(-1, keepdims=True) @ v[cached]
    return out
