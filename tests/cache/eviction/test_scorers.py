"""Scorers give the oracles' numbers, -inf at empty slots, and clear errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.eviction.scorers import AccumulatedAttention, WindowAttention
from kvjax.core.attention import Rule, causal_attention_with_lse
from kvjax.core.attention_mass import Observation, attention_mass, attention_rows
from kvjax.core.random import draw
from kvjax.errors import KvjaxError
from kvjax.methods.keynorm import KeyNorm
from kvjax.methods.random import Random
from tests.contract.layer import spec
from tests.oracles import eviction as oracle
from tests.oracles.test_eviction import LENGTHS, S, W, oracle_scores, random_block


@functools.partial(jax.jit, static_argnums=(0, 3))
def score(scorer, block, obs, window=None):
    return scorer.scores(block, obs, spec(window))


CASES = [
    (WindowAttention(W, 1), None),
    (WindowAttention(W, 5), 9),
    (WindowAttention(W, 7, pool="max", reduce="max"), None),
    (WindowAttention(W, 3, pool="max", reduce_first=True), None),
    (WindowAttention(W, 3, reduce="max", reduce_first=True), None),
    (AccumulatedAttention(), None),
    (AccumulatedAttention("visible"), None),
    (AccumulatedAttention(decay=0.9), None),
    (AccumulatedAttention("visible", decay=0.8), 9),
    (KeyNorm(), None),
]


@pytest.mark.parametrize(("scorer", "window"), CASES, ids=str)
@pytest.mark.parametrize("padding", [0.0, 1e4, np.inf])
def test_scores_are_the_oracles(scorer, window, padding):
    block, obs = random_block(padding=padding, queries=scorer.num_queries or None)
    heads, kv = map(np.asarray, score(scorer, block, obs, window))
    assert kv.dtype == heads.dtype == jnp.float32 and kv.shape == (4, 2, S)
    for b, n in enumerate(LENGTHS):
        expected_heads, expected = oracle_scores(scorer, b, n, window)
        np.testing.assert_allclose(kv[b, :, :n], expected, atol=1e-5)
        np.testing.assert_allclose(heads[b].reshape(-1, S)[:, :n], expected_heads.reshape(-1, n), atol=1e-5)
        assert (kv[b, :, n:] == -np.inf).all() and (heads[b, ..., n:] == -np.inf).all()


def test_a_window_takes_its_queries_from_all_of_them():
    block, few = random_block(queries=W)
    scorer = WindowAttention(W, 3)
    np.testing.assert_allclose(score(scorer, block, few)[1], score(scorer, *random_block())[1], atol=1e-6)


def test_only_positions_say_which_queries_are_real():
    block, obs = random_block(queries=W)
    rolled = Observation(np.roll(obs.q, 2, 3), np.roll(obs.pos, 2, 1))
    scorer = WindowAttention(W, 3)
    np.testing.assert_allclose(score(scorer, block, obs)[1], score(scorer, block, rolled)[1], atol=1e-6)


def test_the_window_outranks_the_past_and_a_short_row_is_all_window():
    block, obs = random_block(queries=W)
    scores = np.asarray(score(WindowAttention(W, 3), block, obs)[1])
    for b, n in enumerate(LENGTHS):
        assert scores[b, :, max(n - W, 0) : n].min() >= 1
        assert n <= W or scores[b, :, : n - W].max() < 1
    assert len(np.unique(scores[1, 0, : LENGTHS[1]])) == LENGTHS[1]  # and ranked by the queries it has


def test_queries_are_read_a_few_at_a_time():
    block, obs = random_block()
    weights = np.ones(obs.pos.shape, np.float32)
    for window in (None, 9):
        run = functools.partial(attention_mass, rule=Rule(window))
        at_once, in_blocks = (jax.jit(functools.partial(run, block_size=n)) for n in (64, 7))
        for x, y in zip(at_once(block, obs, weights), in_blocks(block, obs, weights), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
def test_sums_that_are_known_change_nothing(window):
    block, obs = random_block()
    _, sums = causal_attention_with_lse(obs.q, block.k, block.v, rule=Rule(window))
    mass = jax.jit(functools.partial(attention_mass, rule=Rule(window), block_size=7))
    weights = np.ones(obs.pos.shape, np.float32)
    for x, y in zip(mass(block, obs, weights), mass(block, obs._replace(softmax_lse=sums), weights), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    twice = mass(block, obs._replace(softmax_lse=sums - np.float32(np.log(2))), weights)[0]
    np.testing.assert_allclose(twice, 2 * mass(block, obs, weights)[0], atol=1e-5)  # the mass is divided by them


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("padding", [0.0, np.inf])
@pytest.mark.parametrize("num_queries", [W, None])
def test_rows_are_the_oracles_and_add_up_to_the_mass(num_queries, padding, window):
    block, obs = random_block(padding=padding, queries=num_queries)
    rows = np.asarray(jax.jit(functools.partial(attention_rows, rule=Rule(window)))(block, obs))
    q, k, _, _ = oracle.random_prompts(LENGTHS, S, 0)
    for b, n in enumerate(LENGTHS):
        weights = oracle.attention_weights(q[b, :, :, :n], k[b, :, :n], window)  # of all queries [K G n n]
        for row, pos in zip(np.moveaxis(rows[b], 2, 0), np.asarray(obs.pos[b]), strict=True):
            want = weights[:, :, pos] if pos >= 0 else np.zeros_like(weights[:, :, 0])
            np.testing.assert_allclose(row[..., :n], want, atol=1e-6)
            assert (row[..., n:] == 0).all()
    mass = jax.jit(functools.partial(attention_mass, rule=Rule(window)))(block, obs, jnp.ones(obs.pos.shape))[0]
    np.testing.assert_allclose(rows.sum(3), mass, atol=1e-5)


def test_random_scores_belong_to_seed_head_and_position():
    block, obs = random_block()
    a, b = (np.asarray(score(Random(s), block, None)[1]) for s in (0, 1))
    n = LENGTHS[2]
    np.testing.assert_array_equal(a[0, :, :n], a[2, :, :n])
    assert (a[0] >= 0).all() and (a[0] < 1).all()
    assert (a[0, 0] != a[0, 1]).all() and (a[0] != b[0]).all()


def test_draws_are_spread_evenly_and_never_repeat():
    i = jnp.arange(20000, dtype=jnp.int32)
    streams = np.stack([np.asarray(draw(seed, i)) for seed in (0, 1, 2**31)] + [np.asarray(draw(0, i * 0 + 1, i))])
    assert all(len(np.unique(draws)) == len(draws) for draws in streams)
    u = streams / 2**32
    np.testing.assert_allclose(u.mean(1), 0.5, atol=0.01)
    np.testing.assert_allclose([np.histogram(draws, 16, (0, 1))[0] for draws in u], 1250, atol=200)
    np.testing.assert_allclose(np.corrcoef(np.concatenate([u, u[:1, ::-1]])), np.eye(5), atol=0.03)
    assert abs(np.corrcoef(u[0, 1:], u[0, :-1])[0, 1]) < 0.03 and abs((streams[0] % 2).mean() - 0.5) < 0.02


@pytest.mark.parametrize("scorer", [WindowAttention(8), AccumulatedAttention("visible"), KeyNorm(), Random()], ids=str)
def test_no_array_has_queries_times_slots_and_scores_are_float32(scorer):
    block, obs = random_block(lengths=(500, 17), S=512)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 3 else x, (block, obs))
    program = jax.make_jaxpr(lambda *xs: score(scorer, *xs, 300))(*half)
    assert "512,512" not in str(program) and "2,512,8" in str(program)
    assert {x.dtype for x in program.out_avals} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: WindowAttention(32, 4), "kernel must be odd.*got 4; use 5"),
        (lambda: WindowAttention(32, 0), "got 0; use 5"),
        (lambda: WindowAttention(0), "queries must be at least 1, got 0"),
        (lambda: WindowAttention(pool="sum"), "pool must be one of 'avg', 'max', got 'sum'"),
        (lambda: WindowAttention(reduce="sum"), "reduce must be one of 'mean', 'max', got 'sum'"),
        (lambda: AccumulatedAttention("mean"), "normalise must be one of 'none', 'visible', got 'mean'"),
        (lambda: AccumulatedAttention(decay=0.0), r"decay must lie in \(0, 1\], got 0.0"),
        (
            lambda: WindowAttention(7).scores(random_block()[0], None, spec()),
            "got none; observe the last 7 of each sequence",
        ),
        (
            lambda: AccumulatedAttention().scores(random_block()[0], None, spec()),
            "got none; observe all of each sequence",
        ),
    ],
)
def test_wrong_settings_are_named(make, says):
    with pytest.raises(KvjaxError, match=says):
        make()
