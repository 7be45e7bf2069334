"""R-KV against its oracle, on ragged sequences and keys that nearly repeat one another."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.methods.rkv import RKV, redundancy
from tests.contract import layer
from tests.oracles import rkv as oracle

SETTINGS = {"window": 2, "kernel": 3, "mix": 0.3, "threshold": 0.5}


def score_tokens(scorer: RKV, block: KVBlock, observation: Observation) -> np.ndarray:
    """The scores f32[B K S] of a block."""
    return np.asarray(jax.jit(lambda *x: scorer.scores(*x, layer.spec()).per_kv_head)(block, observation))


def similar_keys(seed: int) -> layer.SequenceBatch:
    """Sequences whose keys have two channels, so that many point in nearly the same direction."""
    batch = layer.random_batch(seed)
    return dataclasses.replace(batch, k=batch.k.at[..., 2:].set(0.0))


def test_three_equal_keys_by_hand():
    k = jnp.ones((1, 1, 3, 2))
    actual = redundancy(KVBlock(k, k, jnp.arange(3)[None, None]), 0.5)
    np.testing.assert_allclose(actual[0, 0], [0.4484, 0.3213, 0.2302], atol=5e-5)


def test_redundancy_is_counted_a_block_at_a_time():
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(2, 2, 9, 3)), jnp.float32)
    block = KVBlock(k, k, jnp.arange(9)[None, None].repeat(2, 0))
    actual = redundancy(block, 0.5, at_once=4)
    for keys, row_scores in zip(np.asarray(k, np.float64).reshape(4, 9, 3), actual.reshape(4, 9), strict=True):
        np.testing.assert_allclose(row_scores, oracle.redundancy(keys), atol=1e-6)


@pytest.mark.parametrize("padding", [0.0, np.inf])
def test_scores_are_those_of_real_tokens_alone(padding):
    q, block = layer.prompt(similar_keys(2), padding)
    scorer = RKV(SETTINGS["window"], *(SETTINGS[name] for name in ("kernel", "mix", "threshold")))
    actual = score_tokens(scorer, block, Observation(q, block.pos[:, 0]))
    for b, n in enumerate(layer.LENGTHS.tolist()):
        past = max(n - 2, 0)
        assert (actual[b, :, past:n] == 1).all() and (actual[b, :, n:] == -np.inf).all()
        for head in range(layer.K) if past else ():
            queries, keys = np.asarray(q[b, head, :, past:n], np.float64), np.asarray(block.k[b, head, :n], np.float64)
            np.testing.assert_allclose(actual[b, head, :past], oracle.scores(queries, keys, **SETTINGS), atol=1e-6)


def test_a_full_buffer_is_compressed_by_the_latest_queries():
    batch = similar_keys(4)
    out = layer.decode("rkv:budget=5,every=2,window=2,kernel=3,mix=0.3", batch)
    for b, n in enumerate(batch.lengths.tolist()):
        for head in range(layer.K):
            q, k, v = batch.exact(b, head)
            np.testing.assert_allclose(out[b, head], oracle.decode(q, k, v, n, 2, 5, **SETTINGS), atol=2e-5)
