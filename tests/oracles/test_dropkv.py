"""DropKV in NumPy, float64, by leaving each token out of the softmax, from its paper (OpenReview UVbaJoD3Qa)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.methods.dropkv import DropKV
from tests.contract import layer
from tests.oracles.eviction import pool_scores


def attend(logits: np.ndarray, v: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum() @ v


def scores(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int, kernel: int) -> np.ndarray:
    """The scores [T] of one key/value head's tokens by q [G T H], k, v [T H]; the last token sees all, others less."""
    G, T, H = q.shape
    moved = np.zeros((G, T))
    for g in range(G):
        for t in range(max(T - window, 0), T):
            logits = k[: t + 1] @ q[g, t] / np.sqrt(H)
            output = attend(logits, v[: t + 1])
            for s in range(t + 1):
                others = np.arange(t + 1) != s
                if others.any():  # nothing is left of a query's only token
                    moved[g, s] += np.square(attend(logits[others], v[: t + 1][others]) - output).sum()
    return pool_scores(moved.mean(0), kernel, "avg")


@pytest.mark.parametrize(("window", "kernel"), [(3, 3), (8, 1)])
def test_scores_are_the_squared_moves_of_outputs_whatever_padding_holds(window, kernel):
    batch, scorer = layer.random_batch(3, loudness=0.3), DropKV(window, kernel)
    score = jax.jit(functools.partial(scorer.scores, spec=layer.spec()))
    for padding in (0.0, np.inf):
        q, block = layer.prompt(batch, padding)
        actual = np.asarray(score(block, Observation(q, block.pos[:, 0])).per_kv_head)
        for b, n in enumerate(batch.lengths):
            for head in range(layer.K):
                expected = scores(*(x[..., :n, :] for x in batch.exact(b, head)), window, kernel)
                np.testing.assert_allclose(actual[b, head, :n], expected, rtol=2e-3, atol=1e-6)
            assert (actual[b, :, n:] == -np.inf).all()


def test_a_weight_near_one_keeps_its_digits():
    """One token has all but 1e-3 of the weight; expanded squares would lose its score, |v_1 - v_0|^2, in rounding."""
    v = np.array([[1000.0, 0.0], [1001.0, 0.0]], np.float32)[None, None]
    k = np.array([[0.0, 0.0], [np.log(999) * np.sqrt(2), 0.0]], np.float32)[None, None]
    block = KVBlock(jnp.asarray(k), jnp.asarray(v), jnp.array([[[0, 1]]]))
    observation = Observation(jnp.array([1.0, 0.0])[None, None, None, None], jnp.array([[1]]))
    spec = layer.spec(head_dim=2)
    actual = jax.jit(functools.partial(DropKV(1, 1).scores, spec=spec))(block, observation).per_kv_head[0, 0]
    np.testing.assert_allclose(actual, [1e-6, 1.0], rtol=0.15)
