"""Expected Attention against its oracle, on ragged sequences, and over unequal heads."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.rope import Rope, RopeScaling
from kvjax.core.types import KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.expected_attention import (
    CalibratedExpectedAttention,
    ExpectedAttention,
    QueryStatistics,
    expected_logits,
)
from tests.contract import layer
from tests.oracles import expected_attention as oracle

SETTINGS = [
    ExpectedAttention(sinks=2, future=40),
    ExpectedAttention(sinks=0, future=3, covariance=False, epsilon=0.02),
    ExpectedAttention(sinks=1, future=1, value_norms=False),
]
FREQUENCIES = 1 / 10_000 ** (np.arange(layer.H // 2) / (layer.H // 2))


@functools.cache
def compile_scores(scorer: ExpectedAttention, spec: LayerSpec):
    return jax.jit(lambda block, observation: scorer.scores(block, observation, spec).per_kv_head)


def oracle_scores(scorer: ExpectedAttention, batch: layer.SequenceBatch, b: int, head: int) -> np.ndarray:
    n = int(batch.lengths[b])
    q, k, v = (np.asarray(x[b, head, ..., :n, :], np.float64) for x in (batch.q, batch.k, batch.v))
    options = (scorer.sinks, scorer.future, scorer.covariance, scorer.value_norms, scorer.epsilon)
    return oracle.scores(q, k, v, FREQUENCIES, *options)


@pytest.mark.parametrize("scorer", SETTINGS, ids=str)
def test_scores_are_those_of_its_oracle_whatever_padding_holds(scorer):
    batch = layer.random_batch(3)
    for padding in (0.0, np.inf):
        q, block = layer.prompt(batch, padding)
        actual = np.asarray(compile_scores(scorer, layer.spec())(block, Observation(q, block.pos[:, 0])))
        for b, n in enumerate(batch.lengths):
            for head in range(layer.K):
                if n > scorer.sinks:
                    expected = oracle_scores(scorer, batch, b, head)
                    np.testing.assert_allclose(actual[b, head, scorer.sinks : n], expected, rtol=2e-4)
            assert (actual[b, :, n:] == -np.inf).all() and np.isfinite(actual[b, :, :n]).all()


def test_one_position_ahead_by_hand():
    """Both queries are (1, 0) without their rotation, and (0, 1) at the next position, a quarter turn ahead."""
    rope = Rope(2, scaling=RopeScaling("linear", 4 / np.pi))  # two positions make a quarter turn
    pos, eighth = np.arange(2, dtype=np.int32)[None], np.sqrt(0.5)
    q, k, v = (
        np.array(x, np.float32)[None, None]
        for x in ([[[1, 0], [eighth, eighth]]], [[0, np.sqrt(2) * np.log(3)], [0, 0]], [[1, 0], [0, 2]])
    )
    spec = LayerSpec(index=0, num_layers=1, num_kv_heads=1, num_groups=1, head_dim=2, rope=rope)
    actual = compile_scores(ExpectedAttention(sinks=0, future=1), spec)(
        KVBlock(k, v, pos[:, None]), Observation(q, pos)
    )
    np.testing.assert_allclose(actual[0, 0], [0.75, 0.5], atol=1e-5)


def test_the_spread_of_queries_is_read_a_block_of_keys_at_a_time():
    rng = np.random.default_rng(0)
    k, mean, spread = (rng.normal(size=(1, 1, *shape)).astype(np.float32) for shape in ((7, 3), (2, 3), (2, 3, 3)))
    by_three = jax.jit(functools.partial(expected_logits, keys_at_once=3))
    x, m, c = (a[0, 0].astype(np.float64) for a in (k, mean, spread))
    expected = m @ x.T / np.sqrt(3) + np.einsum("si,gij,sj->gs", x, c, x) / 6
    np.testing.assert_allclose(by_three(k, mean, spread)[0, 0], expected, atol=1e-5)


def test_what_left_the_sliding_window_scores_zero():
    q, block = layer.prompt(layer.random_batch())
    actual = compile_scores(SETTINGS[0], layer.spec(window=5))(block, Observation(q, block.pos[:, 0]))
    assert (np.asarray(actual[0]) > 0).tolist() == [[False] * 5 + [True] * 4] * layer.K  # the next query is at 9


def test_over_unequal_heads_the_best_of_all_heads_stay():
    batch, budget, scorer = layer.random_batch(5), 5, ExpectedAttention(sinks=1, future=4)
    bound = layer.bind(f"expected_attention:budget={budget},sinks=1,future=4 + adakv:alpha=0,rule=kvpress,page=4")
    positions = np.asarray(bound.positions(layer.prefill(bound, batch)))
    for b, n in enumerate(batch.lengths.tolist()):
        tokens = [sorted(p for p in positions[b, head].tolist() if p >= 0) for head in range(layer.K)]
        if n <= budget:
            assert tokens == [list(range(n))] * layer.K
            continue
        all_scores = np.stack([oracle_scores(scorer, batch, b, head) for head in range(layer.K)])
        best = np.argsort(-all_scores, None)[: layer.K * (budget - 1)]
        assert tokens == [[0, *sorted(1 + i % (n - 1) for i in best if i // (n - 1) == h)] for h in range(layer.K)]


def test_statistics_of_the_prompt_itself_in_a_table_give_its_own_scores(tmp_path):
    """A covariance in a table is over tokens - 1, and the prompt's own over tokens."""
    batch, scorer = dataclasses.replace(layer.random_batch(3), lengths=np.array([9, 9, 9], np.int32)), SETTINGS[0]
    kind, (q, block) = QueryStatistics(sinks=scorer.sinks), layer.prompt(batch, np.inf)
    observation = Observation(q, block.pos[:, 0])
    counts = jax.jit(lambda block, observation: kind.count(block, observation, layer.spec()))(block, observation)
    arrays = kind.arrays(jax.tree.map(lambda x: np.asarray(x[0], np.float64), counts), layer.spec())
    bare = np.array(
        [
            [
                [oracle.rotation_matrix(t, FREQUENCIES).T @ np.asarray(queries[t], float) for t in range(2, 9)]
                for queries in head
            ]
            for head in q[0]
        ]
    )
    np.testing.assert_allclose(arrays["mean"], bare.mean(2), atol=1e-5)
    for head, statistics in enumerate(bare):
        for group, queries in enumerate(statistics):
            np.testing.assert_allclose(arrays["covariance"][head, group], np.cov(queries.T), atol=1e-4)
    arrays = arrays | {"covariance": arrays["covariance"] * 6 / 7}
    table = TableFile(
        str(table_file.write(tmp_path / "t", "query_statistics", layer.spec(), [arrays])), "query_statistics"
    )
    fields = {field.name: getattr(scorer, field.name) for field in dataclasses.fields(scorer)}
    calibrated = CalibratedExpectedAttention(**fields, given=table)
    last = Observation(q[:, :, :, -1:], block.pos[:, 0, -1:])
    actual = np.asarray(compile_scores(calibrated, layer.spec())(block, last))
    for head in range(layer.K):
        np.testing.assert_allclose(actual[0, head, 2:], oracle_scores(scorer, batch, 0, head), rtol=2e-4)


def test_texts_without_enough_queries_are_refused():
    with pytest.raises(KvjaxError, match="1 tokens of these texts stand behind the first 4, .* give longer texts"):
        QueryStatistics().arrays({"tokens": np.ones((1, 1))}, layer.spec())
