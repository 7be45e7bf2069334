"""HeadKV's budgets (arXiv 2410.19258, section 3), from the formula in its public code (`ReasonSnapKVCluster`)."""

from __future__ import annotations


def capacities(weights, budget: int, window: int, beta: float) -> list[list[int]]:
    """The tokens that each head keeps, its window included, by weights [L][K]."""
    base = budget - window
    heads = sum(len(layer_weights) for layer_weights in weights)
    total = sum(sum(layer_weights) for layer_weights in weights)
    pool, floor = (base // beta) * heads, base - base // beta
    return [[window + round(w / total * pool + floor) for w in layer_weights] for layer_weights in weights]
