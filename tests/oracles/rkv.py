"""R-KV in NumPy, float64, from its paper (arXiv 2505.24133) and public code: one key/value head of one sequence."""

from __future__ import annotations

import numpy as np

from tests.oracles.online import softmax


def redundancy(keys: np.ndarray, threshold: float = 0.5) -> np.ndarray:
    """The softmax [S] of each key's mean cosine to all keys [S H], without the newest near duplicate of each."""
    unit = keys / (np.linalg.norm(keys, axis=1, keepdims=True) + 1e-8)
    total = np.zeros(len(keys))
    for i in range(len(keys)):
        similarities = unit @ unit[i]
        similarities[i] = 0
        similarities[max([j for j in range(len(keys)) if similarities[j] > threshold], default=0)] = 0
        total += similarities
    return softmax(total / len(keys))


def scores(q, keys, window: int, kernel: int, mix: float, threshold: float) -> np.ndarray:
    """The scores [S - window] of tokens before the window, from the last queries q [G w H] and keys [S H]."""
    past = len(keys) - window
    logits = (q @ keys[:past].T / np.sqrt(keys.shape[1])).max(0)
    observed = softmax(logits).mean(0)
    radius = kernel // 2
    attention = np.array([observed[max(i - radius, 0) : i + radius + 1].max() for i in range(past)])
    return mix * attention - (1 - mix) * redundancy(keys, threshold)[:past]


def select_tokens(q, k, cached: list[int], t: int, budget: int, window: int, kernel: int, mix: float, threshold: float):
    """Selects `budget` of the cached tokens by the queries up to t: q [G S H], k [S H]."""
    token_scores = scores(q[:, t - window + 1 : t + 1], k[cached], window, kernel, mix, threshold)
    best = np.argsort(-token_scores, kind="stable")[: budget - window]
    return [cached[i] for i in sorted(best)] + cached[-window:]


def decode(q, k, v, n: int, interval: int, budget: int, **options) -> np.ndarray:
    """Decodes q [G S H], k, v [S H], a prompt of n tokens -> outputs [G S-n H]; a full cache shrinks before a token."""
    G, S, H = q.shape
    cached, out = list(range(n)), np.empty((G, S - n, H))
    if n > budget:
        cached = select_tokens(q, k, cached, n - 1, budget, **options)
    for t in range(n, S):
        if len(cached) == budget + interval:
            cached = select_tokens(q, k, cached, t, budget, **options)
        cached.append(t)
        out[:, t - n] = softmax(q[:, t] @ k[cached].T / np.sqrt(H)) @ v[cached]
    return out
