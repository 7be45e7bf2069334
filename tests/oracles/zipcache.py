"""ZipCache in NumPy, float64, one row at a time (He et al. 2024, arXiv 2405.14256, and its authors' code)."""

from __future__ import annotations

from math import ceil, floor

import numpy as np


def probes(n: int, share: float, chance) -> list[int]:
    """The newest of n queries, and those of the others with the highest numbers chance [n]."""
    first = n - ceil(share * n - 1e-9)
    others = sorted(range(first), key=lambda t: (-chance[t], t))
    return sorted(others[: floor(share * n + 1e-9)] + list(range(first, n)))


def saliency(a, asked, normalise="queries", window=None) -> np.ndarray:
    """Attention [K G T T] of all prompt queries, and the probes among them -> [K T], mean over the query heads."""
    K, G, T, _ = a.shape
    out = np.zeros((K, T))
    for s in range(T):
        seeing = [t for t in range(s, T) if window is None or t - s < window]
        number = len(seeing) if normalise == "queries" else len([t for t in seeing if t in asked])
        out[:, s] = a[:, :, asked, s].sum((1, 2)) / G / max(number, 1)
    return out


def lowest(s, share: float) -> list[int]:
    """The tokens of one head that go into the low tier, ascending; of equal ones the earlier."""
    order = sorted(range(len(s)), key=lambda t: (s[t], t))
    return sorted(order[: floor(share * len(s) + 1e-9)])


def levels(x, bits: int) -> np.ndarray:
    """A group of numbers, rounded to 2^bits levels from its minimum to its maximum."""
    lo, step = x.min(), (x.max() - x.min()) / (2**bits - 1)
    return np.round((x - lo) / step) * step + lo if step > 0 else x


def channels(x, bits: int) -> np.ndarray:
    """Tokens x [T H] of one head, each channel a group."""
    return np.stack([levels(c, bits) for c in x.T], 1) if len(x) else x


def separable(x, bits: int) -> np.ndarray:
    """Tokens x [T H] of one head: each token a group, once channels are divided by the root of their largest value."""
    if not len(x):
        return x
    root = np.sqrt(np.abs(x).max(0))
    return np.stack([levels(t / np.where(root > 0, root, 1.0), bits) * root for t in x])


def held(k, v, prompt: int, low, every: int, bits=(2, 4)) -> tuple[np.ndarray, np.ndarray]:
    """One head's tokens k, v [T H] as the last of them sees them: `prompt` of the prompt, of which some are low."""
    k, v = k.astype(float).copy(), v.astype(float).copy()
    high = [t for t in range(prompt) if t not in set(low)]
    groups = [(list(low), bits[0]), (high, bits[1])]
    full = (len(k) - 1 - prompt) // every
    groups += [(list(range(prompt + c * every, prompt + (c + 1) * every)), bits[1]) for c in range(full)]
    for tokens, b in groups:
        k[tokens], v[tokens] = channels(k[tokens], b), separable(v[tokens], b)
    return k, v
