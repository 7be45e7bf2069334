"""ZipCache in NumPy, float64, from its paper (arXiv 2405.14256) and its authors' code: one sequence at a time."""

from __future__ import annotations

from math import ceil, floor

import numpy as np


def probe_queries(n: int, fraction: float, uniform) -> list[int]:
    """The newest of n queries, and those of the others with the highest random numbers [n]."""
    first = n - ceil(fraction * n - 1e-9)
    others = sorted(range(first), key=lambda t: (-uniform[t], t))
    return sorted(others[: floor(fraction * n + 1e-9)] + list(range(first, n)))


def saliency(attention, probes, normalise="queries", window=None) -> np.ndarray:
    """The attention [K T] of the probes, in the mean over query heads, from that of all prompt queries [K G T T]."""
    K, G, T, _ = attention.shape
    out = np.zeros((K, T))
    for s in range(T):
        queries = [t for t in range(s, T) if window is None or t - s < window]
        num_queries = len(queries) if normalise == "queries" else len([t for t in queries if t in probes])
        out[:, s] = attention[:, :, probes, s].sum((1, 2)) / G / max(num_queries, 1)
    return out


def low_tier_tokens(scores, fraction: float) -> list[int]:
    """The tokens of one head in the low tier, ascending; ties go to the earlier token."""
    order = sorted(range(len(scores)), key=lambda t: (scores[t], t))
    return sorted(order[: floor(fraction * len(scores) + 1e-9)])


def round_to_levels(x, bits: int) -> np.ndarray:
    """Rounds a group of numbers to 2^bits levels from its minimum to its maximum."""
    minimum, step = x.min(), (x.max() - x.min()) / (2**bits - 1)
    return np.round((x - minimum) / step) * step + minimum if step > 0 else x


def quantize_channels(x, bits: int) -> np.ndarray:
    """Rounds tokens x [T H] of one head, with a group per channel."""
    return np.stack([round_to_levels(c, bits) for c in x.T], 1) if len(x) else x


def quantize_separable(x, bits: int) -> np.ndarray:
    """Rounds tokens x [T H] of one head, with a group per token and channels divided by the root of their maximum."""
    if not len(x):
        return x
    root = np.sqrt(np.abs(x).max(0))
    return np.stack([round_to_levels(t / np.where(root > 0, root, 1.0), bits) * root for t in x])


def reconstruct(k, v, prompt: int, low_tier, chunk_tokens: int, bits=(2, 4)) -> tuple[np.ndarray, np.ndarray]:
    """One head's stored k, v [T H] as the last token reads them; some of the `prompt` first are in the low tier."""
    k, v = k.astype(float).copy(), v.astype(float).copy()
    high = [t for t in range(prompt) if t not in set(low_tier)]
    groups = [(list(low_tier), bits[0]), (high, bits[1])]
    num_chunks = (len(k) - 1 - prompt) // chunk_tokens
    groups += [
        (list(range(prompt + c * chunk_tokens, prompt + (c + 1) * chunk_tokens)), bits[1]) for c in range(num_chunks)
    ]
    for tokens, num_bits in groups:
        k[tokens], v[tokens] = quantize_channels(k[tokens], num_bits), quantize_separable(v[tokens], num_bits)
    return k, v
