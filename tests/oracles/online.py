"""StreamingLLM, H2O and Scissorhands in NumPy, float64, one sequence and one step at a time.

StreamingLLM: arXiv 2309.17453, section 3.2. H2O: 2306.14048, section 4. Scissorhands: 2305.17118, section 4.
"""

from __future__ import annotations

import numpy as np


def softmax(s: np.ndarray) -> np.ndarray:
    """The softmax over the last axis."""
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def rope(x: np.ndarray, pos: np.ndarray, theta: float = 10_000.0) -> np.ndarray:
    """Rotates x [... S H] to positions pos [S]; channel i is paired with channel i + H / 2."""
    half = x.shape[-1] // 2
    angle = np.asarray(pos, np.float64)[:, None] / theta ** (np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def streaming_llm(q, k, v, n: int, sinks: int, recent: int, reindex: bool) -> np.ndarray:
    """Decodes q [G S H], k, v [S H] of one head before RoPE, a prompt of n tokens -> outputs [G S-n H] of the rest.

    Keys take positions 0..m-1, their index in the cache with the newest token last; the query takes m-1.
    """
    G, S, H = q.shape
    cache = [s for s in range(n) if s < sinks or s >= n - recent]
    out = np.empty((G, S - n, H))
    for t in range(n, S):
        visible = np.array(cache + [t])
        pos = np.arange(len(visible)) if reindex else visible
        keys = rope(k[visible], pos)
        query = rope(q[:, t : t + 1], pos[-1:])[:, 0]
        out[:, t - n] = softmax(query @ keys.T / np.sqrt(H)) @ v[visible]
        cache = list(visible)
        while len(cache) > sinks + recent:
            del cache[sinks]
    return out


def h2o(q, k, v, n: int, heavy: int, recent: int, decay=1.0, normalise="none", layer=False):
    """Decodes q [K G S H], k, v [K S H], a prompt of n tokens -> (outputs [K G S-n H], cached tokens per head).

    score <- decay * score + attention, summed over the queries of the head. Over budget the lowest score leaves that
    is not among the last `recent` tokens; ties go to the older token. With `layer` all heads have their mean score.
    """
    K, G, S, H = q.shape
    scores = np.zeros((K, S))
    cached = [[] for _ in range(K)]
    out = np.empty((K, G, S - n, H))

    def eviction_score(head, s, t):
        return scores[head, s] / (t - s + 1) if normalise == "visible-count" else scores[head, s]

    def evict(head, t, count):
        for _ in range(count):
            old = sorted(s for s in cached[head] if s <= t - recent)
            cached[head].remove(min(old, key=lambda s: eviction_score(head, s, t)))

    for t in range(S):
        added = np.zeros((K, S))
        for head in range(K):
            cached[head].append(t)
            visible = cached[head]
            weights = softmax(q[head, :, t] @ k[head, visible].T / np.sqrt(H))
            if t >= n:
                out[head, :, t - n] = weights @ v[head, visible]
            added[head, visible] = weights.sum(0)
        scores = decay * scores + (np.broadcast_to(added.mean(0), added.shape) if layer else added)
        if t == n - 1 or t >= n:
            for head in range(K):
                evict(head, t, max(len(cached[head]) - heavy - recent, 0))
    return out, [set(x) for x in cached]


def scissorhands(q, k, v, n: int, budget: int, history: int, recent: int, drop: float):
    """Decodes q [G S H], k, v [S H] of one head, a prompt of n tokens -> (outputs [G S-n H], sizes after each step).

    Over budget it counts for each token how often its weight was below the mean, in the last `history` steps since the
    previous compression; the last `recent` tokens count 0. The highest counts are evicted until
    budget - floor(drop * budget) tokens are left, older tokens first.
    """
    G, S, H = q.shape
    cached: list[int] = []
    steps: list[dict[int, bool]] = []  # one dict per step: token -> weight below the mean
    out, sizes = np.empty((G, S - n, H)), []
    for t in range(S):
        cached.append(t)
        weights = softmax(q[:, t] @ k[cached].T / np.sqrt(H))
        if t >= n:
            out[:, t - n] = weights @ v[cached]
        steps.append({s: w < 1 / len(cached) for s, w in zip(cached, weights.mean(0), strict=True)})
        if t >= n - 1 and len(cached) > budget:
            count = {s: sum(step.get(s, False) for step in steps[-history:]) for s in cached}
            count.update({s: 0 for s in cached if s > t - recent})
            best = sorted(cached, key=lambda s: (count[s], -s))[: budget - int(drop * budget)]
            cached, steps = sorted(best), []
        if t >= n:
            sizes.append(len(cached))
    return out, sizes
