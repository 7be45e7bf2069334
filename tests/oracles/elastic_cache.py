"""Elastic Cache in NumPy, float64, from its paper (arXiv 2407.18121) and public code, with true ranks: one sequence."""

from __future__ import annotations

import numpy as np

from tests.oracles.merge import evicted_tokens


def select_tokens(received: np.ndarray, budget: int, sinks: int) -> list[int]:
    """Selects the sinks, the last token and the best others by attention received [T], the mean over all heads."""
    T = len(received)
    if budget >= T:
        return list(range(T))
    others = sorted(range(sinks, T - 1), key=lambda t: -received[t])
    return sorted([*range(sinks), *others[: budget - sinks - 1], T - 1])


def merge_tokens(x: np.ndarray, tokens: list[int], sinks: int) -> np.ndarray:
    """Averages keys or values [T H]: each kept token with the evicted tokens that are nearest to it."""
    anchors = tokens[sinks:-1]
    groups = {s: [s] for s in tokens}
    for t in evicted_tokens(x, tokens):
        if anchors:
            groups[min(anchors, key=lambda s: (abs(s - t), s))].append(t)
    return np.array([x[groups[s]].astype(float).mean(0) for s in tokens])


def positions_after_decode(prompt_tokens: list[int], n: int, num_steps: int, budget: int, distance: int) -> list[int]:
    """The cached positions after `num_steps` steps that follow a prompt of n tokens."""
    positions = list(prompt_tokens)
    for t in range(n, n + num_steps):
        positions.append(t)
        if len(positions) > budget:
            del positions[-1 - distance]
    return positions
