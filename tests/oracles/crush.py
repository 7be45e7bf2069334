"""KVCrush and its k-means baseline in NumPy, one row at a time (arXiv 2503.00022, sections III and IV-C).

Random choices are given as numbers, so that nothing here depends on a generator.
"""

from __future__ import annotations

from math import floor

import numpy as np

from tests.oracles.eviction import split_units, top_indices, unit_scores


def vote_bits(heads, units, kind="heads") -> list[list[int]]:
    """Scores [N T] of the query heads -> the bits of each unit: per token one bit per head ("heads"), or one."""
    score_rows = heads if kind == "heads" else heads.mean(0, keepdims=True)
    tokens = [t for u in units for t in range(*u)]
    voted = []
    for head_scores in score_rows:
        upper_half = top_indices([head_scores[t] for t in tokens], len(tokens) // 2)
        voted.append({tokens[i] for i in upper_half})
    return [[int(t in v) for t in range(*u) for v in voted] for u in units]


def anchor_bits(bits, kind: str, coins) -> list[int]:
    """The anchor of as many bits as each unit has; coins: the bits of the random one."""
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
    """Hamming distance of each unit's bits to the anchor."""
    return [sum(x != y for x, y in zip(b, anchor, strict=True)) for b in bits]


def pick_buckets(d, candidates, m: int, numbers) -> list[int]:
    """Equal-count buckets of the order by (distance, index); bucket i takes its member numbers[i] mod its size."""
    order = sorted(candidates, key=lambda j: (d[j], j))
    picked = []
    for i, bucket in enumerate(np.array_split(np.array(order, int), m)):
        picked.append(int(bucket[int(numbers[i]) % len(bucket)]))
    return picked


def pick_stride(d, candidates, m: int) -> list[int]:
    """Every (n // m)-th of the same order (OpenVINO)."""
    order = sorted(candidates, key=lambda j: (d[j], j))
    return [order[i * (len(order) // m)] for i in range(m)]


def pick_bins(d, candidates, m: int, n_bits: int, numbers) -> list[int]:
    """Equal-width bins of distance; members leave a bin by rising numbers[j] of unit j, one per bin and round."""
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
    """Lloyd over points {index: vector} from the points `start` -> of each cluster the point nearest its centroid.

    Of distances within 0.01% the first counts.
    """

    def first(d) -> int:
        return next(i for i, x in enumerate(d) if x <= 1.0001 * min(d))

    def away(j: int, centroid) -> float:
        return ((x[j] - centroid) ** 2).sum()

    centroids = [x[j].astype(float) for j in start]
    for step in range(iterations + 1):
        clusters = [[] for _ in start]
        for j in sorted(x):
            clusters[first([away(j, c) for c in centroids])].append(j)
        if step < iterations:
            centroids = [
                np.mean([x[j] for j in c], 0) if c else old for c, old in zip(clusters, centroids, strict=True)
            ]
    return [c[first([away(j, m) for j in c])] for c, m in zip(clusters, centroids, strict=True) if c]


def select_tokens(
    heads, scores, budget, sinks, recent, fraction, choose, unit_tokens=1, reduce="sum"
) -> list[list[int]]:
    """One row: heads [N T], scores [K T] -> tokens that each key/value head keeps, ascending.

    choose(units, candidates, m) -> representatives. share of the unit quota goes to representatives, taken from the
    units that no head keeps as important; what they leave of it goes to each head's next best units.
    """
    always, units, quota = split_units(scores.shape[1], budget, sinks, recent, unit_tokens)
    values = [unit_scores(head_scores, units, reduce) for head_scores in scores]
    num_representatives = floor(fraction * quota + 1e-9)
    important = {i for head_scores in values for i in top_indices(head_scores, quota - num_representatives)}
    candidates = [i for i in range(len(units)) if i not in important]
    num_representatives = min(num_representatives, len(candidates))
    representatives = choose(units, candidates, num_representatives) if num_representatives else []
    assert len(representatives) == len(set(representatives)) <= num_representatives and set(representatives) <= set(
        candidates
    )
    out = []
    for head_scores in values:
        chosen = representatives + top_indices(head_scores, quota - len(representatives), excluded=representatives)
        out.append(sorted(always + [t for i in chosen for t in range(*units[i])]))
    return out
