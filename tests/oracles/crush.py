"""KVCrush and its k-means baseline in NumPy, one sequence at a time (arXiv 2503.00022, sections III and IV-C).

Random choices are arguments, so that the oracle depends on no generator.
"""

from __future__ import annotations

from math import floor

import numpy as np

from tests.oracles.eviction import split_units, top_indices, unit_scores


def vote_bits(heads, units, kind="heads") -> list[list[int]]:
    """The bits of each unit from scores [N T] of the query heads: per token one bit per head ("heads"), or one."""
    score_rows = heads if kind == "heads" else heads.mean(0, keepdims=True)
    tokens = [t for u in units for t in range(*u)]
    voted = []
    for head_scores in score_rows:
        upper_half = top_indices([head_scores[t] for t in tokens], len(tokens) // 2)
        voted.append({tokens[i] for i in upper_half})
    return [[int(t in v) for t in range(*u) for v in voted] for u in units]


def anchor_bits(bits, kind: str, coins) -> list[int]:
    """The anchor, which has the bits of a unit; `coins` are the bits of a random anchor."""
    num_bits = len(bits[0])
    if kind == "mean":
        return [int(sum(b[i] for b in bits) / len(bits) > 0.5) for i in range(num_bits)]
    return {
        "random": list(coins[:num_bits]),
        "alternate": [i % 2 for i in range(num_bits)],
        "zeros": [0] * num_bits,
        "ones": [1] * num_bits,
    }[kind]


def distances(bits, anchor) -> list[int]:
    """The Hamming distance of each unit's bits to the anchor."""
    return [sum(x != y for x, y in zip(b, anchor, strict=True)) for b in bits]


def pick_buckets(d, candidates, m: int, numbers) -> list[int]:
    """Picks from each bucket of equal size in the order (distance, index) the member numbers[i] modulo its size."""
    order = sorted(candidates, key=lambda j: (d[j], j))
    picked = []
    for i, bucket in enumerate(np.array_split(np.array(order, int), m)):
        picked.append(int(bucket[int(numbers[i]) % len(bucket)]))
    return picked


def pick_stride(d, candidates, m: int) -> list[int]:
    """Picks every (n // m)-th unit of the same order (OpenVINO)."""
    order = sorted(candidates, key=lambda j: (d[j], j))
    return [order[i * (len(order) // m)] for i in range(m)]


def pick_bins(d, candidates, m: int, n_bits: int, numbers) -> list[int]:
    """Picks from bins of equal width in distance, one unit per bin and round, in the order of the units' numbers."""
    content = [[] for _ in range(m)]
    for j in candidates:
        content[d[j] * m // (n_bits + 1)].append(j)
    for c in content:
        c.sort(key=lambda j: (int(numbers[j]), j))
    picked = []
    while len(picked) < m:
        for c in content:
            if c and len(picked) < m:
                picked.append(c.pop(0))
    return picked


def pick_kmeans(x, start, iterations: int) -> list[int]:
    """Runs Lloyd's k-means over points {index: vector} from the points `start`; picks the point nearest each centroid.

    Distances within 0.01% are equal, and the first one counts.
    """

    def nearest(targets, point) -> int:
        square_distances = [((target - point) ** 2).sum() for target in targets]
        return next(i for i, d in enumerate(square_distances) if d <= 1.0001 * min(square_distances))

    centroids = [x[j].astype(float) for j in start]
    for step in range(iterations + 1):
        clusters = [[] for _ in start]
        for j in sorted(x):
            clusters[nearest(centroids, x[j])].append(j)
        if step < iterations:
            means = [np.mean([x[j] for j in cluster], 0) if cluster else None for cluster in clusters]
            centroids = [old if mean is None else mean for mean, old in zip(means, centroids, strict=True)]
    return [
        cluster[nearest([x[j] for j in cluster], centroid)]
        for cluster, centroid in zip(clusters, centroids, strict=True)
        if cluster
    ]


def select_tokens(
    heads, scores, budget, sinks, recent, fraction, choose, unit_tokens=1, reduce="sum"
) -> list[list[int]]:
    """Selects the tokens of each key/value head, ascending, by scores [N T] of query heads and [K T] of their heads.

    `choose` takes (units, candidates, their number) and returns representatives. They get `fraction` of the quota and
    come from the units that no head keeps as important; each head's next best units fill the rest of the quota.
    """
    always, units, quota = split_units(scores.shape[1], budget, sinks, recent, unit_tokens)
    values = [unit_scores(head_scores, units, reduce) for head_scores in scores]
    num_representatives = floor(fraction * quota + 1e-9)
    important = {i for head_values in values for i in top_indices(head_values, quota - num_representatives)}
    candidates = [i for i in range(len(units)) if i not in important]
    num_representatives = min(num_representatives, len(candidates))
    representatives = choose(units, candidates, num_representatives) if num_representatives else []
    unique = set(representatives)
    assert len(representatives) == len(unique) <= num_representatives and unique <= set(candidates)
    tokens = []
    for head_values in values:
        chosen = representatives + top_indices(head_values, quota - len(representatives), excluded=representatives)
        tokens.append(sorted(always + [t for i in chosen for t in range(*units[i])]))
    return tokens
