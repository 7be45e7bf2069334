"""Compactor and its two halves in NumPy, float64, one sequence at a time: arXiv 2507.08143, constants of kvpress."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.methods.compactor import compactor
from kvjax.methods.leverage_score import LeverageScore, draw_sketch, quadratic_forms
from kvjax.methods.noncausal_attention import NoncausalAttention
from tests.contract import layer
from tests.oracles.test_turned_queries import FREQUENCIES, rotate

SKETCH, CHUNK, SINKS, RECENT = 3, 4, 2, 1


def standardize(scores: np.ndarray) -> np.ndarray:
    """Over all heads and tokens together, by the unbiased variance; nothing to compare gives 0."""
    spread = scores.std(ddof=1) if scores.size > 1 else 0.0
    return (scores - scores.mean()) / max(spread, 1e-6)


def leverage(k: np.ndarray, sketch: np.ndarray, first: int) -> np.ndarray:
    """The scores [K T] of keys k [K T H] after RoPE, the first at position `first`; sketch [K H d]."""
    scores = np.zeros(k.shape[:2])
    for head, keys in enumerate(k):
        unrotated = rotate(keys, -np.arange(first, first + len(keys)), FREQUENCIES)
        x = (unrotated - unrotated.mean(0)) @ sketch[head]
        inverse = np.linalg.inv(x.T @ x + 0.01 * np.eye(x.shape[1]))
        scores[head] = [row @ inverse @ row for row in x]
    return standardize(scores)


def noncausal(q: np.ndarray, k: np.ndarray, v: np.ndarray, chunk: int) -> np.ndarray:
    """The scores [K T] of tokens with q [K G T H], k, v [K T H]."""
    K, G, T, _ = q.shape
    scores = np.zeros((K, T))
    for head in range(K):
        received = np.zeros(T)
        for start in range(0, T, chunk):
            tokens = slice(start, start + chunk)
            for query in q[head, :, tokens].reshape(-1, q.shape[3]):
                weights = np.exp(k[head, tokens] @ query - (k[head, tokens] @ query).max())
                received[tokens] += weights / weights.sum() / G
        padded = np.pad(received * np.linalg.norm(v[head], axis=1), 1)
        scores[head] = (padded[:-2] + padded[1:-1] + padded[2:]) / 3
    return standardize(scores)


def blend(q: np.ndarray, k: np.ndarray, v: np.ndarray, weight: float) -> np.ndarray:
    """Compactor's scores [K n] of the tokens that may leave."""
    free = slice(SINKS, q.shape[2] - RECENT)
    keys = leverage(k[:, free], np.asarray(draw_sketch(0, layer.K, layer.H, SKETCH), float), SINKS)
    return weight * keys + noncausal(q[:, :, free], k[:, free], v[:, free], CHUNK)


def score_tokens(scorer, q: jax.Array, block: KVBlock) -> np.ndarray:
    score = jax.jit(functools.partial(scorer.scores, spec=layer.spec()))
    return np.asarray(score(block, Observation(q, block.pos[:, 0])).per_kv_head)


@pytest.mark.parametrize("name", ["leverage", "noncausal"])
def test_scores_of_each_half_are_those_of_the_oracle_whatever_padding_holds(name):
    batch = layer.random_batch(5, loudness=0.1)  # of loud queries each attends to a single token, unscaled
    scorer = LeverageScore(SKETCH) if name == "leverage" else NoncausalAttention(CHUNK)
    sketch = np.asarray(draw_sketch(0, layer.K, layer.H, SKETCH), float)
    for padding in (0.0, np.inf):
        actual = score_tokens(scorer, *layer.prompt(batch, padding))
        for b, n in enumerate(batch.lengths):
            q, k, v = (x[..., :n, :] for x in batch.exact(b))
            expected = leverage(k, sketch, 0) if name == "leverage" else noncausal(q, k, v, CHUNK)
            np.testing.assert_allclose(actual[b, :, :n], expected, rtol=1e-3, atol=1e-4)
            assert (actual[b, :, n:] == -np.inf).all()


@pytest.mark.parametrize(("budget", "weight"), [("25%", "evicted"), (6, "evicted"), (6, "0.35")])
def test_compactor_keeps_what_the_blend_ranks_first(budget, weight):
    batch = layer.random_batch(6, loudness=0.1)
    method = compactor(budget, weight, CHUNK, SKETCH, SINKS, RECENT)
    positions = np.asarray(layer.prefill(layer.bind(method), batch).pos)
    for b, n in enumerate(batch.lengths.tolist()):
        num_kept = max(min(n, budget if budget == 6 else max(int(n * 0.25), 1)), min(n, SINKS + RECENT))
        always = [*range(min(n, SINKS)), *range(max(n - RECENT, min(n, SINKS)), n)]
        free = np.zeros((layer.K, 0))
        if n > SINKS + RECENT:
            evicted = 1 - min(n, budget if budget == 6 else max(int(n * 0.25), 1)) / n
            free = blend(*(x[..., :n, :] for x in batch.exact(b)), evicted if weight == "evicted" else 0.35)
        for head, scores in enumerate(free):
            best = np.argsort(-scores, kind="stable")[: num_kept - len(always)] + SINKS
            assert sorted(p for p in positions[b, head].tolist() if p >= 0) == sorted([*always, *best.tolist()])


def test_of_equal_keys_and_another_the_other_stands_out():
    """By hand: deviations (-1/3, -1/3, 2/3) of one channel, squares 1/9, 1/9, 4/9 over their sum 2/3 + 0.01."""
    x = jnp.array([-1 / 3, -1 / 3, 2 / 3])[None, None, :, None]
    gram = jnp.einsum("bksd,bkse->bkde", x, x)
    np.testing.assert_allclose(
        quadratic_forms(x, gram, 0.01)[0, 0], np.array([1, 1, 4]) / 9 / (2 / 3 + 0.01), rtol=1e-6
    )


def test_a_matrix_without_full_rank_gives_numbers():
    """Float32 leaves the Gram matrix of a long prompt eigenvalues below 0, of which Cholesky's method makes NaN."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 400, 3)) @ np.ones((3, 8)) * 1e3, jnp.float32)
    scores = np.asarray(quadratic_forms(x, jnp.einsum("bksd,bkse->bkde", x, x), 0.01))
    assert np.isfinite(scores).all() and (scores >= 0).all()


def test_the_sketch_is_gaussian_and_each_head_has_its_own():
    sketch = np.asarray(draw_sketch(1, 4, 64, 48)) * 48**0.5
    assert abs(sketch.mean()) < 0.03 and abs(sketch.std() - 1) < 0.03 and abs((sketch**4).mean() - 3) < 0.3
    assert len(np.unique(sketch)) > 0.999 * sketch.size
    np.testing.assert_array_equal(draw_sketch(1, 2, 64, 48), draw_sketch(1, 4, 64, 48)[:2])
