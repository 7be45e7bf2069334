"""KVMerger in NumPy, float64, from its paper (arXiv 2407.08454): one sequence, one key/value head."""

from __future__ import annotations

import numpy as np


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of two keys; 0 for a key of zeros."""
    return a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12)


def merge_sets(k: np.ndarray, received: np.ndarray, budget: int, heavy: int, recent: int) -> list[list[int]]:
    """Groups consecutive tokens that become one each, joined pair by pair: keys [T H], attention received [T]."""
    T = len(k)
    old = range(max(T - recent, 0))
    unmerged = {*sorted(old, key=lambda t: -received[t])[:heavy], *range(len(old), T)}
    groups = [[t] for t in range(T)]
    while len(groups) > budget:
        free = [i for i in range(1, len(groups)) if groups[i][0] not in unmerged and groups[i - 1][-1] not in unmerged]
        i = max(free, key=lambda i: cosine(k[groups[i - 1][-1]], k[groups[i][0]]))
        groups[i - 1 : i + 1] = [groups[i - 1] + groups[i]]
    return groups


def pivots(sets: list[list[int]], received: np.ndarray) -> list[int]:
    """The most attended token of each set."""
    return [max(members, key=lambda t: received[t]) for members in sets]


def merge_tokens(k, v, sets, pivots, sigma: float = 0.0) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Merges each pivot with the evicted tokens of its set -> (keys, values, tokens that each represents)."""
    keys, values, counts = [], [], []
    for pivot in pivots:
        members = [t for group in sets if pivot in group for t in group if t == pivot or t not in pivots]
        distances = np.array([np.sum((k[pivot] - k[t]) ** 2) for t in members])
        width = sigma**2 or distances.mean()
        weights = np.exp(-distances / (2 * width)) if width else np.ones(len(members))
        keys.append(weights @ k[members] / weights.sum())
        values.append(weights @ v[members] / weights.sum())
        counts.append(len(members))
    return np.array(keys), np.array(values), counts
