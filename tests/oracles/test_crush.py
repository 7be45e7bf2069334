"""KVCrush and k-means keep the tokens of the NumPy oracles, by tokens, chunks and pages (C7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.components import Chunk, EvictableUnits, Page, Token
from kvjax.cache.eviction.scorers import AccumulatedAttention, WindowAttention
from kvjax.core.random import draw
from kvjax.methods.kmeans import KMeans
from kvjax.methods.kvcrush import KVCrush, hamming_distance, pack_bits
from tests.oracles import crush as oracle
from tests.oracles import eviction as eviction_oracle
from tests.oracles.test_eviction import (
    LENGTHS,
    W,
    kept_positions,
    oracle_scores,
    random_block,
    select_block,
)

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
        bits = oracle.vote_bits(heads, units, chooser.bits)
        distances = oracle.distances(
            bits, oracle.anchor_bits(bits, chooser.anchor, random_bits(chooser.seed, len(bits[0])))
        )
        if chooser.rule == "stride":
            return oracle.pick_stride(distances, candidates, num_representatives)
        if chooser.rule == "buckets":
            return oracle.pick_buckets(
                distances, candidates, num_representatives, random_numbers(chooser.seed, num_representatives)
            )
        return oracle.pick_bins(
            distances, candidates, num_representatives, len(bits[0]), random_numbers(chooser.seed, len(units))
        )

    return pick


def oracle_tokens(scorer, b: int, chooser, unit, per="head"):
    heads, scores = oracle_scores(scorer, b, LENGTHS[b])
    scores = scores.mean(0, keepdims=True) if per == "layer" else scores
    flat = heads.reshape(-1, LENGTHS[b])
    return oracle.select_tokens(
        flat, scores, KEEP[b], 2, W, chooser.share, make_picker(chooser, flat), unit.size, unit.score
    )


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
            random_order, bits = random_numbers(chooser.seed, U), np.array(oracle.vote_bits(heads, spans), float)
            keys = np.asarray(units.keys[b]).swapaxes(0, 1).reshape(13, -1)
            points = {j: bits[j] if chooser.features == "bits" else keys[j] for j in candidates}
            start = sorted(candidates, key=lambda j: (int(random_order[j]), j))[:num_representatives]
            yield oracle.pick_kmeans(points, start, chooser.iterations)


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
        expected = oracle.pick_kmeans(dict(enumerate(x[:, None])), start, 10)
        assert sorted(representatives[representatives >= 0].tolist()) == sorted(expected) and len(expected) < 7
        assert len(set(x[expected])) == len(expected)


def test_at_token_level_the_mean_anchor_is_zeros():
    units, count = random_units(1)
    mean, zeros = (choose_representatives(KVCrush(anchor=a), units, count, 11) for a in ("mean", "zeros"))
    np.testing.assert_array_equal(mean, zeros)
