"""Eviction after the prompt in NumPy, one sequence and head at a time.

SnapKV: arXiv 2404.14469, section 4. H2O: arXiv 2306.14048, section 4, with A2SF's decay (arXiv 2407.20485). PyramidKV:
arXiv 2406.02069, section 4. Integers and pooling are those of the public code named at each function.
"""

from __future__ import annotations

import numpy as np


def attention_weights(q, k, window=None) -> np.ndarray:
    """The causal softmax weights [K G T T] of q [K G T H] of all T prompt tokens to k [K T H]."""
    K, G, T, H = q.shape
    out = np.zeros((K, G, T, T))
    for h in range(K):
        for g in range(G):
            for t in range(T):
                first = 0 if window is None else max(0, t - window + 1)
                s = k[h, first : t + 1].astype(np.float64) @ q[h, g, t] / np.sqrt(H)
                e = np.exp(s - s.max())
                out[h, g, t, first : t + 1] = e / e.sum()
    return out


def pool_scores(x, kernel: int, pool: str) -> np.ndarray:
    """Pools like torch's avg_pool1d (zeros at the edges count) or max_pool1d, with stride 1 and padding kernel // 2."""
    radius, out = kernel // 2, np.zeros(len(x))
    for i in range(len(x)):
        neighbors = [x[j] for j in range(i - radius, i + radius + 1) if 0 <= j < len(x)]
        out[i] = sum(neighbors) / kernel if pool == "avg" else max(neighbors)
    return out


def snapkv_scores(
    a, window: int, kernel=5, pool="avg", reduce="mean", reduce_first=False
) -> tuple[np.ndarray, np.ndarray]:
    """SnapKV's scores of the query heads [K G T] and of the key/value heads [K T], from attention [K G T T].

    A window token scores 1 + its own unpooled mean weight.
    """
    K, G, T, _ = a.shape
    observed = a[:, :, -window:].mean(2)
    past = max(T - window, 0)
    reduce_group = {"mean": np.mean, "max": np.max}[reduce]

    def pool_past(scores):
        return np.concatenate([pool_scores(scores[:past], kernel, pool), 1 + scores[past:]])

    heads = np.array([[pool_past(observed[h, g]) for g in range(G)] for h in range(K)])
    if reduce_first:
        return heads, np.array([pool_past(reduce_group(observed[h], 0)) for h in range(K)])
    return heads, reduce_group(heads, 1)


def accumulated_scores(a, normalise="none", decay=1.0, window=None) -> tuple[np.ndarray, np.ndarray]:
    """The column sums [K G T] of attention [K G T T], and their means [K T] over query heads (H2O, A2SF)."""
    K, G, T, _ = a.shape
    heads = np.zeros((K, G, T))
    for s in range(T):
        weight = 0.0
        for t in range(s, T):
            if window is None or t - s < window:
                heads[:, :, s] += decay ** (T - 1 - t) * a[:, :, t, s]
                weight += decay ** (T - 1 - t)
        if normalise == "visible":
            heads[:, :, s] /= weight
    return heads, heads.mean(1)


def split_units(n: int, budget: int, sinks: int, recent: int, unit_tokens: int):
    """Splits n prompt tokens -> (tokens always kept, the units [first, last), the number of units that stay)."""
    if n <= budget:
        return list(range(n)), [], 0
    assert budget >= sinks + recent
    units, start = [], sinks
    while start + unit_tokens <= n - recent:
        units.append((start, start + unit_tokens))
        start += unit_tokens
    always = list(range(sinks)) + list(range(n - recent, n))
    num_free = budget - sinks - recent
    for t in reversed(range(start, n - recent)):  # the remainder, newest first, while the budget allows
        if num_free:
            always.append(t)
            num_free -= 1
    return sorted(always), units, num_free // unit_tokens


def unit_scores(scores, units, reduce="sum") -> list[float]:
    """Reduces the scores [T] of one head to one number per unit."""
    reduce_unit = {"sum": np.sum, "mean": np.mean, "max": np.max}[reduce]
    return [float(reduce_unit(scores[a:b])) for a, b in units]


def top_indices(values, num_best: int, excluded=()) -> list[int]:
    """The indices of the `num_best` highest values that are not in `excluded`; ties go to the lower index."""
    order = sorted((i for i in range(len(values)) if i not in excluded), key=lambda i: (-values[i], i))
    return sorted(order[:num_best])


def select_tokens(scores, budget, sinks, recent, unit_tokens=1, reduce="sum", scope="head") -> list[list[int]]:
    """The token indices that each head keeps, ascending, by scores [K T] of one sequence."""
    K, n = scores.shape
    scores = np.repeat(scores.mean(0, keepdims=True), K, 0) if scope == "layer" else scores
    always, units, quota = split_units(n, budget, sinks, recent, unit_tokens)
    out = []
    for h in range(K):
        chosen = top_indices(unit_scores(scores[h], units, reduce), quota)
        out.append(sorted(always + [t for i in chosen for t in range(*units[i])]))
    return out


def pyramid_budget(T: int, layer: int, num_layers: int, capacity: int, window: int, beta: int = 20) -> int:
    """The budget of a layer with its window, in the integers of PyramidKV's authors; a single layer gets the mean."""
    base = capacity - window
    low = base // beta
    high = base * 2 - low
    if high >= T - window:
        high = T - window
        low = base * 2 - high
    if T < capacity:
        return T
    if T < base * 2 or num_layers == 1:
        return base + window
    return high - layer * ((high - low) // (num_layers - 1)) + window


def kvpress_pyramid_budget(T: int, layer: int, num_layers: int, tokens: int, window: int, beta: int = 20) -> int:
    """The budget of a layer with its window in kvpress' pyramid, for a mean of `tokens` of T tokens."""
    if T <= tokens:
        return T
    low = tokens / beta
    high = tokens * 2 - low
    if high >= T - window:
        high, low = T - window, tokens * 2 - (T - window)
    if num_layers == 1 or not (T >= high >= low >= window):
        return tokens
    return round(high - layer * (high - low) / (num_layers - 1))


def random_prompts(lengths, S: int, seed: int = 0, padding: float = 0.0, K: int = 2, G: int = 2, H: int = 8):
    """Random prompts, left-aligned in S slots: q [B K G S H], k, v [B K S H], pos [B S]; the rest holds `padding`.

    A prompt depends on the seed and its index in `lengths`, not on S.
    """
    B = len(lengths)
    q, k, v = (np.full((B, *shape, H), padding, np.float32) for shape in ((K, G, S), (K, S), (K, S)))
    pos = np.full((B, S), -1, np.int32)
    for b, n in enumerate(lengths):
        rng = np.random.default_rng([seed, b])
        pos[b, :n] = np.arange(n)
        q[b, :, :, :n] = 2 * rng.normal(size=(K, G, n, H))
        k[b, :, :n], v[b, :, :n] = rng.normal(size=(2, K, n, H))
    return q, k, v, pos
