"""Turned queries against their oracle, on ragged sequences, and what they keep over the whole model.

Turned queries in NumPy, float64, from kvjax's own formula (`kvjax/methods/turned_queries.py`).
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.rope import Rope, RopeScaling
from kvjax.core.types import KVBlock
from kvjax.methods.turned_queries import TurnedQueries
from tests.contract import layer


def rotate(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Rotates the pairs (i, i + H/2) of x [n H] by positions [n] times frequencies [H/2]."""
    half = x.shape[1] // 2
    pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * positions[:, None] * frequencies)
    return np.concatenate([pairs.real, pairs.imag], 1)


def scores(
    q: np.ndarray,
    k: np.ndarray,
    frequencies: np.ndarray,
    ahead: int,
    reduce: str = "max",
    stride: int = 1,
    last: float = 1.0,
) -> np.ndarray:
    """The scores [T] of keys k [T H] by queries q [G T H], both after RoPE at positions 0..T-1."""
    T = k.shape[0]
    query_tokens = [t for t in range(T - 1, -1, -stride) if t >= T - max(int(T * last), 1)]
    head_scores = []
    for head in q:
        unrotated = rotate(head, -np.arange(T), frequencies)[query_tokens]
        moved = rotate(unrotated, np.full(len(query_tokens), T + ahead), frequencies)
        logits = moved @ k.T / np.sqrt(k.shape[1])
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        head_scores.append(weights.max(0) if reduce == "max" else weights.mean(0))
    return np.max(head_scores, 0)


FREQUENCIES = 1 / 10_000 ** (np.arange(layer.H // 2) / (layer.H // 2))


def score_tokens(scorer: TurnedQueries, block: KVBlock, observation: Observation, spec: LayerSpec) -> np.ndarray:
    return np.asarray(jax.jit(lambda block, seen: scorer.scores(block, seen, spec).per_kv_head)(block, observation))


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize(
    ("ahead", "stride", "last"), [(0, 1, 1.0), (32, 1, 1.0), (32, 3, 1.0), (4, 1, 0.5), (4, 2, 0.7)]
)
def test_scores_are_those_of_the_oracle_whatever_padding_holds(ahead, stride, last, reduce):
    batch = layer.random_batch(3)
    for padding in (0.0, np.inf):
        q, block = layer.prompt(batch, padding)
        actual = score_tokens(
            TurnedQueries(ahead, reduce, stride, last), block, Observation(q, block.pos[:, 0]), layer.spec()
        )
        for b, n in enumerate(batch.lengths):
            for head in range(layer.K):
                q_row, k_row = (np.asarray(x[b, head, ..., :n, :], np.float64) for x in (batch.q, batch.k))
                expected = scores(q_row, k_row, FREQUENCIES, ahead, reduce, stride, last)
                np.testing.assert_allclose(actual[b, head, :n], expected, rtol=2e-4)
            assert (actual[b, :, n:] == -np.inf).all()


def test_a_token_behind_a_query_counts_by_hand():
    """The first query never saw the second token; turned by two quarters, it points at it and away from the first."""
    rope = Rope(2, scaling=RopeScaling("linear", 2 / np.pi))  # one position makes a quarter turn
    pos = np.arange(2, dtype=np.int32)[None]
    three = np.sqrt(2) * np.log(3) / 2  # logits that differ by log 3
    q = np.array([[1, 0], [0, 1]], np.float32)[None, None, None]  # both (1, 0) without their rotation
    k = np.array([[three, 0], [-three, 0]], np.float32)[None, None]
    spec = LayerSpec(index=0, num_layers=1, num_kv_heads=1, num_groups=1, head_dim=2, rope=rope)
    actual = score_tokens(TurnedQueries(ahead=0), KVBlock(k, k, pos[:, None]), Observation(q, pos), spec)
    np.testing.assert_allclose(actual[0, 0], [0.25, 0.75], atol=1e-5)


def test_what_left_the_sliding_window_scores_zero():
    q, block = layer.prompt(layer.random_batch())
    actual = score_tokens(TurnedQueries(), block, Observation(q, block.pos[:, 0]), layer.spec(window=5))
    assert (actual[0] > 0).tolist() == [[False] * 5 + [True] * 4] * layer.K  # the next query is at 9


def test_all_queries_of_a_longer_prompt_ask_block_by_block():
    rng, T = np.random.default_rng(0), 150
    q, k = (rng.normal(size=shape).astype(np.float32) * 2 for shape in ((1, 1, 2, T, 8), (1, 1, T, 8)))
    pos = np.arange(T, dtype=np.int32)[None]
    spec = LayerSpec(index=0, num_layers=1, num_kv_heads=1, num_groups=2, head_dim=8, rope=Rope(8))
    for how in (("max",), ("mean",), ("max", 4), ("mean", 1, 0.5), ("max", 3, 0.7)):
        actual = score_tokens(TurnedQueries(7, *how), KVBlock(k, k, pos[:, None]), Observation(q, pos), spec)
        expected = scores(q[0, 0].astype(float), k[0, 0].astype(float), 1 / 10_000 ** (np.arange(4) / 4), 7, *how)
        np.testing.assert_allclose(actual[0, 0], expected, rtol=1e-3, atol=1e-7)


def test_a_sample_of_a_ring_is_that_of_the_same_queries_in_order():
    """A cache that is compressed again holds its latest queries at their positions modulo their number."""
    rng, num_cached, W = np.random.default_rng(1), 20, 8
    q, k = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 1, 2, W, 8), (1, 1, num_cached, 8)))
    spec = LayerSpec(index=0, num_layers=1, num_kv_heads=1, num_groups=2, head_dim=8, rope=Rope(8))
    block, pos = (
        KVBlock(k, k, np.arange(num_cached, dtype=np.int32)[None, None]),
        np.arange(num_cached - W, num_cached, dtype=np.int32),
    )
    scorer = TurnedQueries(4, "mean", stride=3)
    ring = np.argsort(pos % W)
    actual = score_tokens(scorer, block, Observation(q[:, :, :, ring], pos[None, ring]), spec)
    sampled = score_tokens(TurnedQueries(4, "mean"), block, Observation(q[:, :, :, 1::3], pos[None, 1::3]), spec)
    np.testing.assert_allclose(actual, sampled, rtol=1e-5)


def test_a_cache_with_gaps_is_read_from_behind_its_last_token():
    """A cache that is compressed again has lost tokens between those it holds; all of them stay readable."""
    rng = np.random.default_rng(2)
    cached_pos = np.array([0, 1, 2, 3, 100, 200, 300, 400, 496, 497, 498, 499], np.int32)
    query_pos = np.arange(492, 500, dtype=np.int32)
    q, k = rng.normal(size=(len(query_pos), 8)), rng.normal(size=(len(cached_pos), 8))
    spec = LayerSpec(index=0, num_layers=1, num_kv_heads=1, num_groups=1, head_dim=8, rope=Rope(8))
    block = KVBlock(*(k[None, None].astype(np.float32),) * 2, cached_pos[None, None])
    actual = score_tokens(
        TurnedQueries(4), block, Observation(q[None, None, None].astype(np.float32), query_pos[None]), spec
    )
    frequencies = 1 / 10_000 ** (np.arange(4) / 4)
    moved = rotate(rotate(q, -query_pos, frequencies), np.full(8, 504), frequencies)
    p = np.exp(moved @ k.T / np.sqrt(8))
    np.testing.assert_allclose(actual[0, 0], (p / p.sum(1, keepdims=True)).max(0), rtol=1e-3)
