"""Prefill-time eviction in NumPy, one row and one head at a time, from the papers and public code named below."""

from __future__ import annotations

import numpy as np


def attention(q, k, window=None) -> np.ndarray:
    """q [K G T H] of all T prompt tokens, k [K T H] -> causal softmax weights [K G T T]."""
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


def pooled(x, kernel: int, pool: str) -> np.ndarray:
    """torch's avg_pool1d (zeros beyond the edges count) or max_pool1d (they do not), stride 1, pad kernel // 2."""
    half, out = kernel // 2, np.zeros(len(x))
    for i in range(len(x)):
        inside = [x[j] for j in range(i - half, i + half + 1) if 0 <= j < len(x)]
        out[i] = sum(inside) / kernel if pool == "avg" else max(inside)
    return out


def snapkv(a, W: int, kernel=5, pool="avg", reduce="mean", reduce_first=False) -> tuple[np.ndarray, np.ndarray]:
    """Attention [K G T T] -> scores of the query heads [K G T], of the key/value heads [K T] (SnapKV).

    Window tokens: 1 + their own unpooled mean weight.
    """
    K, G, T, _ = a.shape
    seen = a[:, :, -W:].mean(2)
    past = max(T - W, 0)
    over = {"mean": np.mean, "max": np.max}[reduce]

    def finish(row):
        return np.concatenate([pooled(row[:past], kernel, pool), 1 + row[past:]])

    heads = np.array([[finish(seen[h, g]) for g in range(G)] for h in range(K)])
    if reduce_first:
        return heads, np.array([finish(over(seen[h], 0)) for h in range(K)])
    return heads, over(heads, 1)


def h2o(a, normalise="none", decay=1.0, window=None) -> tuple[np.ndarray, np.ndarray]:
    """Attention [K G T T] -> column sums of the query heads [K G T], and their group means [K T] (H2O, A2SF)."""
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


def divide(n: int, keep: int, sinks: int, recent: int, c: int):
    """A row of n tokens -> (tokens always kept, the units [first, last), how many units stay)."""
    if n <= keep:
        return list(range(n)), [], 0
    assert keep >= sinks + recent
    units, at = [], sinks
    while at + c <= n - recent:
        units.append((at, at + c))
        at += c
    always = list(range(sinks)) + list(range(n - recent, n))
    room = keep - sinks - recent
    for t in reversed(range(at, n - recent)):  # the remainder, newest first, while there is room
        if room:
            always.append(t)
            room -= 1
    return sorted(always), units, room // c


def worth(scores, units, how="sum") -> list[float]:
    """Scores [T] of one head -> one number per unit."""
    of = {"sum": np.sum, "mean": np.mean, "max": np.max}[how]
    return [float(of(scores[a:b])) for a, b in units]


def best(values, count: int, out=()) -> list[int]:
    """The `count` highest that are not in `out`; ties to the lower index."""
    order = sorted((i for i in range(len(values)) if i not in out), key=lambda i: (-values[i], i))
    return sorted(order[:count])


def kept(scores, keep, sinks, recent, c=1, how="sum", per="head") -> list[list[int]]:
    """Scores [K T] of one row -> the token indices that each head keeps, ascending."""
    K, n = scores.shape
    scores = np.repeat(scores.mean(0, keepdims=True), K, 0) if per == "layer" else scores
    always, units, quota = divide(n, keep, sinks, recent, c)
    out = []
    for h in range(K):
        chosen = best(worth(scores[h], units, how), quota)
        out.append(sorted(always + [t for i in chosen for t in range(*units[i])]))
    return out


def pyramid(T: int, layer: int, L: int, cap: int, w: int, beta: int = 20) -> int:
    """PyramidKV, the authors' integers, window included; one layer gets the mean."""
    base = cap - w
    low = base // beta
    high = base * 2 - low
    if high >= T - w:
        high = T - w
        low = base * 2 - high
    if T < cap:
        return T
    if T < base * 2 or L == 1:
        return base + w
    return high - layer * ((high - low) // (L - 1)) + w


def pyramid_peer(T: int, layer: int, L: int, tokens: int, w: int, beta: int = 20) -> int:
    """kvpress' pyramid for a target of `tokens` of T tokens, window inside each layer's number."""
    if T <= tokens:
        return T
    low = tokens / beta
    high = tokens * 2 - low
    if high >= T - w:
        high, low = T - w, tokens * 2 - (T - w)
    if L == 1 or not (T >= high >= low >= w):
        return tokens
    return round(high - layer * (high - low) / (L - 1))


def prompts(lengths, S: int, seed: int = 0, padding: float = 0.0, K: int = 2, G: int = 2, H: int = 8):
    """Random prompts, left-aligned in S slots: q [B K G S H], k, v [B K S H], pos [B S]; the rest holds `padding`.

    What a row holds depends on the seed and its place in `lengths`, not on S.
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
