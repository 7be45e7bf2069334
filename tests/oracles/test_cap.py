"""CapKV in NumPy, float64, one sequence at a time, from arXiv 2604.25975 with kvpress' normalization and rotation."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from kvjax.core.attention_mass import Observation
from kvjax.methods.cap import Capacity
from tests.contract import layer
from tests.oracles.test_turned_queries import FREQUENCIES, rotate


def scores(q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: int, tau: float, future: int, epsilon: float):
    """The scores [T] of one key/value head's tokens after the sinks, 0 for these; q [G T H], k, v [T H]."""
    T, heads = len(k), []
    for queries in q:
        mean = rotate(queries, -np.arange(T), FREQUENCIES)[sinks:].mean(0)
        anchor = np.mean([rotate(mean[None], np.array([T + i]), FREQUENCIES)[0] for i in range(future)], 0)
        cosine = k[sinks:] @ anchor / np.linalg.norm(anchor) / np.linalg.norm(k[sinks:], axis=1)
        weights = np.exp(tau * (cosine - cosine.max()))
        matrix = np.eye(v.shape[1]) + sum(
            (w + epsilon) * np.outer(x, x) for w, x in zip(weights, v[sinks:], strict=True)
        )
        heads.append([w * x @ np.linalg.solve(matrix, x) for w, x in zip(weights, v[sinks:], strict=True)])
    return np.pad(np.mean(heads, 0), (sinks, 0))


@pytest.mark.parametrize(("sinks", "tau", "epsilon"), [(2, 5.0, 1e-6), (0, 1.0, 0.1)])
def test_scores_are_those_of_the_oracle_whatever_padding_holds(sinks, tau, epsilon):
    batch, scorer = layer.random_batch(4), Capacity(tau, sinks, 3, epsilon)
    score = jax.jit(functools.partial(scorer.scores, spec=layer.spec()))
    for padding in (0.0, np.inf):
        q, block = layer.prompt(batch, padding)
        actual = np.asarray(score(block, Observation(q, block.pos[:, 0])).per_kv_head)
        for b, n in enumerate(batch.lengths):
            for head in range(layer.K):
                arrays = (x[..., :n, :] for x in batch.exact(b, head))
                expected = scores(*arrays, sinks, tau, 3, epsilon) if n > sinks else np.zeros(n)
                np.testing.assert_allclose(actual[b, head, :n], expected, rtol=1e-3, atol=1e-6)
            assert (actual[b, :, n:] == -np.inf).all()


def test_a_token_takes_its_part_of_the_determinant():
    """Leaving token s out multiplies det A by 1 - w_s v_s A^-1 v_s, so that large scores are large losses of volume."""
    rng = np.random.default_rng(0)
    v, w = rng.normal(size=(7, 4)), rng.uniform(size=7)
    matrix = np.eye(4) + (v.T * w) @ v
    for s in range(7):
        without = matrix - w[s] * np.outer(v[s], v[s])
        score = w[s] * v[s] @ np.linalg.solve(matrix, v[s])
        np.testing.assert_allclose(np.linalg.det(without) / np.linalg.det(matrix), 1 - score)


def test_what_left_the_sliding_window_scores_zero():
    q, block = layer.prompt(layer.random_batch())
    score = jax.jit(functools.partial(Capacity(sinks=0, future=3).scores, spec=layer.spec(window=5)))
    actual = np.asarray(score(block, Observation(q, block.pos[:, 0])).per_kv_head)
    assert (actual[0] > 0).tolist() == [[False] * 5 + [True] * 4] * layer.K  # the next query is at 9
