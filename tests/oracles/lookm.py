"""LOOK-M in NumPy, float64, from its paper (arXiv 2406.18139) and KVCache-Factory's `merge_kv`: one head."""

from __future__ import annotations

import numpy as np

from tests.oracles.merge import evicted_tokens, nearest_kept


def select_tokens(received: np.ndarray, budget: int, recent: int, sinks: int, images: list[int]) -> list[int]:
    """Selects the sinks and recent tokens, then text before images, the best by attention received [T] first."""
    T = len(received)
    if budget >= T:
        return list(range(T))
    always = [t for t in range(T) if t < sinks or t >= T - recent]
    others = [t for t in range(T) if t not in always]
    others.sort(key=lambda t: (t in images, -received[t], t))
    return sorted(always + others[: budget - len(always)])


def merge_tokens(k: np.ndarray, v: np.ndarray, tokens: list[int], rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Merges evicted tokens into the nearest kept ones: k, v [T H] -> keys and values of the kept tokens."""
    evicted = [(t, *nearest_kept(k, tokens, t)) for t in evicted_tokens(k, tokens)]
    groups = [(s, [(t, u) for t, to, u in evicted if to == place]) for place, s in enumerate(tokens)]
    keys, values = (np.array([merge_into(x, s, members, rule) for s, members in groups]) for x in (k, v))
    return keys, values


def merge_into(x: np.ndarray, s: int, evicted: list[tuple[int, float]], rule: str) -> np.ndarray:
    """Merges evicted tokens, given with their cosines, into token s of x [T H]."""
    if rule == "normalised":
        weights = {t: max((u + 1) / 2, 1e-6) for t, u in evicted}
        return (x[s] + sum(w * x[t] for t, w in weights.items())) / (1 + sum(weights.values()))
    total = x[s].astype(float)
    for t, u in evicted:
        total += {"average": x[t], "pivot": (x[t] + x[s]) / 2, "weighted": u * x[t]}[rule]
    return total / (1 + len(evicted))
