"""A budget over the whole model in NumPy, one prompt at a time, from KVzip's paper (2505.23416, section 3.3).

The paper keeps the pairs with the highest scores among all heads of all layers. The order of ties, and the fraction of
its own best units that every head keeps, are kvjax's own (`ModelRanking`).
"""

from __future__ import annotations

import numpy as np


def select_units(scores, quotas: list[int], safe: float = 0.0) -> list[list[list[int]]]:
    """Selects the units [L][K][..] by scores [L][K][U] and the units that heads of each layer keep in the mean.

    Each head keeps at least the fraction `safe` of its layer's mean, rounded down.
    """
    ranking = [
        (layer, head, unit)
        for layer, heads in enumerate(scores)
        for head, units in enumerate(heads)
        for unit in range(len(units))
    ]
    protected = set()
    for layer, heads in enumerate(scores):
        for head, units in enumerate(heads):
            protected |= {
                (layer, head, unit)
                for unit in np.argsort(-np.asarray(units), kind="stable")[: int(safe * quotas[layer])].tolist()
            }
    ranking.sort(
        key=lambda unit_index: (
            unit_index not in protected,
            -scores[unit_index[0]][unit_index[1]][unit_index[2]],
            unit_index,
        )
    )
    total = sum(quota * len(heads) for quota, heads in zip(quotas, scores, strict=True))
    best = set(ranking[:total])
    return [
        [[unit for unit in range(len(units)) if (layer, head, unit) in best] for head, units in enumerate(heads)]
        for layer, heads in enumerate(scores)
    ]
