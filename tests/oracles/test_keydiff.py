"""KeyDiff against its oracle, on ragged sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.types import KVBlock
from kvjax.methods.keydiff import KeyDiff
from tests.contract import layer
from tests.oracles import keydiff as oracle


def score_keys(k: jax.Array, pos: jax.Array) -> np.ndarray:
    return np.asarray(KeyDiff().scores(KVBlock(k, k, pos), None, layer.spec()).per_kv_head)


def test_of_two_equal_keys_and_another_the_other_stays_first():
    k = jnp.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])[None, None]
    np.testing.assert_allclose(score_keys(k, jnp.arange(3)[None, None])[0, 0], [-0.8944, -0.8944, -0.4472], atol=1e-4)


@pytest.mark.parametrize("padding", [0.0, 1e4, np.inf])
def test_scores_are_those_of_real_tokens_alone(padding):
    block = layer.prompt(layer.random_batch(2), padding)[1]
    actual = score_keys(block.k, block.pos)
    for b, n in enumerate(layer.LENGTHS):
        for head in range(layer.K):
            expected = oracle.scores(np.asarray(block.k[b, head, :n], np.float64))
            np.testing.assert_allclose(actual[b, head, :n], expected, atol=1e-6)
        assert (actual[b, :, n:] == -np.inf).all()


def test_a_key_of_zeros_points_nowhere():
    k = jnp.zeros((1, 1, 3, 2)).at[0, 0, 2].set(jnp.array([3.0, 4.0]))
    np.testing.assert_allclose(score_keys(k, jnp.arange(3)[None, None])[0, 0], [0.0, 0.0, -1.0], atol=1e-6)


def test_each_head_keeps_its_most_different_keys():
    batch = layer.random_batch(1)
    positions = layer.prefill(layer.bind("keydiff:budget=5"), batch).pos
    for b, n in enumerate(batch.lengths.tolist()):
        for head in range(layer.K):
            expected = oracle.select_tokens(np.asarray(batch.k[b, head, :n], np.float64), list(range(n)), 5)
            assert sorted(p for p in positions[b, head].tolist() if p >= 0) == expected


def test_with_recompress_it_chooses_again_at_every_step():
    batch = layer.random_batch(4)
    out = layer.decode("keydiff:budget=5 + recompress:every=1", batch)
    for b, n in enumerate(batch.lengths.tolist()):
        for head in range(layer.K):
            q, k, v = batch.exact(b, head)
            np.testing.assert_allclose(out[b, head], oracle.decode(q, k, v, n, 5), atol=2e-5)
