"""KVCrush and k-means keep the tokens of the NumPy oracles, by tokens, chunks and pages (C7).

KVCrush and its k-means baseline in NumPy, one sequence at a time (arXiv 2503.00022, sections III and IV-C).

Random choices are arguments, so that the oracle depends on no generator.
"""

from __future__ import annotations

import functools
from math import floor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.components import EvictableUnits
from kvjax.cache.eviction.granularity import Chunk, Page, Token
from kvjax.cache.eviction.scorers import AccumulatedAttention, WindowAttention
from kvjax.core.random import draw
from kvjax.methods.kmeans import KMeans
from kvjax.methods.kvcrush import KVCrush, hamming_distance, pack_bits
from tests.oracles import eviction as eviction_oracle
from tests.oracles.eviction import split_units, top_indices, unit_scores
from tests.oracles.test_eviction import (
    LENGTHS,
    W,
    kept_positions,
    oracle_scores,
    random_block,
    select_block,
)


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


def oracle_distances(bits, anchor) -> list[int]:
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


KEEP = np.array([22, 16, 18, 12], np.int32)
ARGUMENTS = dict(slots=22, sinks=2, recent=W)


def random_numbers(seed: int, count: int) -> np.ndarray:
    return np.asarray(draw(seed, jnp.arange(count, dtype=jnp.int32)))


def random_bits(seed: int, count: int) -> list[int]:
    i = jnp.arange(count, dtype=jnp.int32)
    return (np.asarray(draw(seed, jnp.zeros_like(i), i)) % 2).tolist()


def make_picker(chooser: KVCrush, heads):
    """Makes the oracle's function that picks representatives for a KVCrush."""

    def pick(units, candidates, num_representatives):
        bits = vote_bits(heads, units, chooser.bits)
        distances = oracle_distances(bits, anchor_bits(bits, chooser.anchor, random_bits(chooser.seed, len(bits[0]))))
        if chooser.rule == "stride":
            return pick_stride(distances, candidates, num_representatives)
        if chooser.rule == "buckets":
            return pick_buckets(
                distances, candidates, num_representatives, random_numbers(chooser.seed, num_representatives)
            )
        return pick_bins(
            distances, candidates, num_representatives, len(bits[0]), random_numbers(chooser.seed, len(units))
        )

    return pick


def oracle_tokens(scorer, b: int, chooser, unit, per="head"):
    heads, scores = oracle_scores(scorer, b, LENGTHS[b])
    scores = scores.mean(0, keepdims=True) if per == "layer" else scores
    flat = heads.reshape(-1, LENGTHS[b])
    return select_tokens(flat, scores, KEEP[b], 2, W, chooser.share, make_picker(chooser, flat), unit.size, unit.score)


@functools.partial(jax.jit, static_argnums=(0, 3))
def choose_representatives(chooser, units, count, places):
    return chooser.choose(units, count, places)


def random_units(unit_tokens: int, padding: float = 0.0, seed: int = 0):
    """Units of three ragged sequences, padded with `padding`, and the number of representatives of each."""
    rng = np.random.default_rng(seed)
    num_units, B, K, G, U, H = np.array([13, 4, 9]), 3, 2, 3, 13, 4
    valid = np.arange(U)[None] < num_units[:, None]
    scores = np.where(valid[:, None, None, :, None], rng.normal(size=(B, K, G, U, unit_tokens)), padding).astype(
        np.float32
    )
    keys = np.where(valid[:, None, :, None, None], rng.normal(size=(B, K, U, unit_tokens, H)), padding).astype(
        np.float32
    )
    candidates = valid & (rng.random((B, U)) < 0.8)
    return EvictableUnits(scores, keys, valid, candidates), np.array([7, 2, 20], np.int32)


def oracle_representatives(chooser, unit_tokens: int):
    """The representatives that the oracle picks from `random_units`, sequence by sequence."""
    units, count = random_units(unit_tokens)
    for b in range(3):
        U = int(units.valid[b].sum())
        spans = [(j * unit_tokens, j * unit_tokens + unit_tokens) for j in range(U)]
        heads = np.asarray(units.scores[b]).reshape(6, -1)
        candidates = np.flatnonzero(units.candidates[b]).tolist()
        num_representatives = min(int(count[b]), len(candidates))
        if isinstance(chooser, KVCrush):
            yield make_picker(chooser, heads)(spans, candidates, num_representatives)
        else:
            random_order, bits = random_numbers(chooser.seed, U), np.array(vote_bits(heads, spans), float)
            keys = np.asarray(units.keys[b]).swapaxes(0, 1).reshape(13, -1)
            points = {j: bits[j] if chooser.features == "bits" else keys[j] for j in candidates}
            start = sorted(candidates, key=lambda j: (int(random_order[j]), j))[:num_representatives]
            yield pick_kmeans(points, start, chooser.iterations)


@pytest.mark.parametrize(
    ("unit_tokens", "chooser"),
    [
        (1, KVCrush()),
        (1, KVCrush(anchor="zeros", rule="bins", seed=3)),
        (6, KVCrush(anchor="random", rule="stride", seed=2)),
        (6, KVCrush(anchor="mean")),
        (6, KVCrush(anchor="alternate", rule="bins", seed=1)),
        (6, KVCrush(anchor="ones", bits="positions", rule="stride")),
        (1, KMeans()),
        (6, KMeans(iterations=1, seed=4)),
        (6, KMeans(iterations=2, features="bits")),
    ],
    ids=str,
)
def test_representatives_are_the_oracles(unit_tokens, chooser):
    units, count = random_units(unit_tokens)
    actual = np.asarray(choose_representatives(chooser, units, count, 11))
    for representatives, expected, n in zip(
        actual, oracle_representatives(chooser, unit_tokens), (7, 2, 11), strict=True
    ):
        assert sorted(representatives[representatives >= 0].tolist()) == sorted(expected)
        assert (representatives[n:] == -1).all()
    for padding in (1e4, np.inf, np.nan):
        np.testing.assert_array_equal(
            actual, choose_representatives(chooser, random_units(unit_tokens, padding)[0], count, 11)
        )


CASES = [
    (Token(), KVCrush()),
    (Chunk(3), KVCrush(0.7, "alternate", "bins", seed=5)),
    (Page(2), KVCrush(0.5, "mean", "stride", "positions")),
]


@pytest.mark.parametrize(("unit", "chooser"), CASES, ids=str)
def test_kvcrush_keeps_what_the_oracle_keeps(unit, chooser):
    out = select_block(*random_block(), KEEP, scorer=AccumulatedAttention(), unit=unit, represent=chooser, **ARGUMENTS)
    for b in range(len(LENGTHS)):
        assert kept_positions(out, b) == oracle_tokens(AccumulatedAttention(), b, chooser, unit)


def test_kvcrush_over_snapkv_for_the_whole_layer():
    scorer, chooser = WindowAttention(W, 3), KVCrush(0.5, "ones")
    out = select_block(
        *random_block(queries=W), KEEP, scorer=scorer, unit=Token(), represent=chooser, per="layer", **ARGUMENTS
    )
    for b in range(len(LENGTHS)):
        assert kept_positions(out, b) == oracle_tokens(scorer, b, chooser, Token(), "layer")


def test_representatives_are_shared_and_the_count_stays():
    plain = select_block(
        *random_block(), KEEP, scorer=AccumulatedAttention(), unit=Token(), represent=KVCrush(0.0), **ARGUMENTS
    )
    crushed = select_block(
        *random_block(), KEEP, scorer=AccumulatedAttention(), unit=Token(), represent=KVCrush(), **ARGUMENTS
    )
    for b, n in enumerate(LENGTHS):
        a, unit_tokens = kept_positions(plain, b), kept_positions(crushed, b)
        assert [len(x) for x in a] == [len(x) for x in unit_tokens] == [min(n, KEEP[b])] * 2
        scores = oracle_scores(AccumulatedAttention(), b, n)[1]
        assert a == eviction_oracle.select_tokens(scores, int(KEEP[b]), 2, W)  # a fraction of 0 picks none
    new = [
        set(unit_tokens) - set(a)
        for a, unit_tokens in zip(kept_positions(plain, 0), kept_positions(crushed, 0), strict=True)
    ]
    assert new[0] & new[1] and max(map(len, new)) <= 3  # a quarter of 14


@pytest.mark.parametrize("n", [1, 31, 32, 70])
def test_packed_distances(n):
    rng = np.random.default_rng(n)
    a, b = rng.random((2, 3, 5, n)) < 0.5
    actual = hamming_distance(pack_bits(jnp.asarray(a)), pack_bits(jnp.asarray(b)))
    np.testing.assert_array_equal(actual, (a != b).sum(-1))


def test_of_equal_tokens_kmeans_keeps_one_and_its_empty_clusters_stay_where_they_are():
    units, _ = random_units(1)
    values = np.array([5.0] * 8 + [-0.6, 0.1, 0.7, 2.0, 9.0])
    features = np.stack([np.random.default_rng(b).permutation(values) for b in range(3)]).astype(np.float32)
    keys = np.broadcast_to(features[:, None, :, None, None], units.keys.shape)
    every = np.ones((3, 13), bool)
    actual = choose_representatives(
        KMeans(), EvictableUnits(units.scores, keys, every, every), np.full(3, 7, np.int32), 11
    )
    start = np.argsort(random_numbers(0, 13), kind="stable")[:7]
    for representatives, x in zip(np.asarray(actual), features, strict=True):
        expected = pick_kmeans(dict(enumerate(x[:, None])), start, 10)
        assert sorted(representatives[representatives >= 0].tolist()) == sorted(expected) and len(expected) < 7
        assert len(set(x[expected])) == len(expected)


def test_at_token_level_the_mean_anchor_is_zeros():
    units, count = random_units(1)
    mean, zeros = (choose_representatives(KVCrush(anchor=a), units, count, 11) for a in ("mean", "zeros"))
    np.testing.assert_array_equal(mean, zeros)
