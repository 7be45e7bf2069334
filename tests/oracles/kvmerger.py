"""KVMerger in NumPy, float64, from its description (2407.08454): one row, one key/value head."""

from __future__ import annotations

import numpy as np


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of two keys; 0 for a key of zeros."""
    return a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12)


def sets(k: np.ndarray, received: np.ndarray, budget: int, heavy: int, recent: int) -> list[list[int]]:
    """Keys [T H], attention received [T] -> consecutive tokens that become one each, joined pair by pair."""
    T = len(k)
    old = range(max(T - recent, 0))
    alone = {*sorted(old, key=lambda t: -received[t])[:heavy], *range(len(old), T)}
    found = [[t] for t in range(T)]
    while len(found) > budget:
        free = [i for i in range(1, len(found)) if found[i][0] not in alone and found[i - 1][-1] not in alone]
        i = max(free, key=lambda i: cosine(k[found[i - 1][-1]], k[found[i][0]]))
        found[i - 1 : i + 1] = [found[i - 1] + found[i]]
    return found


def pivots(found: list[list[int]], received: np.ndarray) -> list[int]:
    """The most attended token of each set."""
    return [max(one, key=lambda t: received[t]) for one in found]


def merged(k, v, found, stay, sigma: float = 0.0) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """The tokens that stay, each with the lost ones of its set -> (keys, values, tokens that each stands for)."""
    keys, values, number = [], [], []
    for p in stay:
        mine = [t for one in found if p in one for t in one if t == p or t not in stay]
        d = np.array([np.sum((k[p] - k[t]) ** 2) for t in mine])
        width = sigma**2 or d.mean()
        g = np.exp(-d / (2 * width)) if width else np.ones(len(mine))
        keys.append(g @ k[mine] / g.sum())
        values.append(g @ v[mine] / g.sum())
        number.append(len(mine))
    return np.array(keys), np.array(values), number
