"""Partials merge exactly, and blockwise prefill attention is dense attention without the S x S array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.attention import (
    MASKED_LOGIT,
    Partial,
    Rule,
    attend_scores,
    causal_attention,
    causal_attention_with_lse,
    merge,
    scores,
    visible,
)
from kvjax.testing import dense_attention

B, K, G, H = 2, 2, 3, 4


def random_qkv(T: int, S: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((B, K, G, T, H), (B, K, S, H), (B, K, S, H)))


def dense_outputs(q, k, v, q_pos, window=None, soft_cap=None) -> np.ndarray:
    heads = np.asarray(q).reshape(B, K * G, -1, H)
    outputs = [
        dense_attention(heads[b], np.asarray(k[b]), np.asarray(v[b]), q_pos, window, soft_cap=soft_cap)
        for b in range(B)
    ]
    return np.stack(outputs).reshape(q.shape)


@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 9]])
def test_any_partition_of_the_slots_merges_to_dense_attention(cuts):
    q, k, v = random_qkv(2, 10)
    q_pos = jnp.full((B, 2), 9)
    edges = [0, *cuts, 10]
    parts = [attend_scores(scores(q, k[:, :, a:b]), v[:, :, a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    np.testing.assert_allclose(merge(parts), dense_outputs(q, k, v, np.asarray(q_pos[0])), atol=1e-6)


def test_slots_that_nothing_sees_change_nothing():
    q, k, v = random_qkv(1, 6)
    part = attend_scores(scores(q, k), v)
    hidden = attend_scores(jnp.full((B, K, G, 1, 5), MASKED_LOGIT), jnp.full((B, K, 5, H), 1e3))
    np.testing.assert_array_equal(merge([part, hidden]), merge([part]))
    assert not np.any(merge([hidden, hidden]))


def test_logits_of_thousands_do_not_overflow():
    o = jnp.ones((1, 1, 1, 1, H))
    far = Partial(o, jnp.full((1, 1, 1, 1), 3e4), jnp.ones((1, 1, 1, 1)))
    near = Partial(2 * o, jnp.full((1, 1, 1, 1), -3e4), jnp.ones((1, 1, 1, 1)))
    np.testing.assert_array_equal(merge([far, near]), o)


@pytest.mark.parametrize("groups", [1, 20])  # few queries and many take different products
def test_scores_are_scaled_dot_products(groups):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(1, 2, groups, 1, H)), rng.normal(size=(1, 2, 5, H))
    expected = np.einsum("bkgth,bksh->bkgts", q, k) / 2
    np.testing.assert_allclose(scores(jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32)), expected, atol=1e-6)


def test_visible_is_filled_past_and_inside_the_window():
    pos = jnp.array([[[0, 3, -1, 7, 8]]])
    without_window = visible(pos, jnp.array([[7]]))[0, 0, 0, 0].tolist()
    assert without_window == [True, True, False, True, False]
    assert visible(pos, jnp.array([[7]]), Rule(4))[0, 0, 0, 0].tolist() == [False, False, False, True, False]
    assert visible(pos, jnp.array([[7]]), Rule(5))[0, 0, 0, 0].tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("block", [1, 4, 5, 64])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (1, None), (6, None), (None, 0.5), (6, 1.0)])
def test_blockwise_causal_attention_is_dense(block, window, soft_cap):
    q, k, v = random_qkv(13, 13)
    expected = dense_outputs(q, k, v, np.arange(13), window, soft_cap)
    np.testing.assert_allclose(causal_attention(q, k, v, rule=Rule(window, soft_cap), block=block), expected, atol=1e-6)
    # A cap that changes nothing could not be told from one that is left out.
    assert soft_cap is None or np.abs(expected - dense_outputs(q, k, v, np.arange(13), window)).max() > 0.1


def test_logits_are_bounded_before_their_bias_and_the_mask():
    s, pos = jnp.asarray([0.0, 3.0, -5.0, 9.0]).reshape(1, 1, 1, 1, 4), jnp.asarray([[[0, 1, -1, 3]]])
    bias, q_pos = jnp.asarray([[[0.0, 7.0, 0.0, 0.0]]]), jnp.asarray([[3]])
    logits = Rule(3, 2.0).logits(s, pos, q_pos, bias)[0, 0, 0, 0]
    expected = [MASKED_LOGIT, 2 * np.tanh(1.5) + 7, MASKED_LOGIT, 2 * np.tanh(4.5)]
    np.testing.assert_allclose(logits, expected, rtol=1e-6)
    unread = Rule().logits(s, pos, q_pos, readable=s < 5)[0, 0, 0, 0]
    np.testing.assert_array_equal(unread, np.float32([0, 3, MASKED_LOGIT, MASKED_LOGIT]))


@pytest.mark.parametrize("window", [None, 6])
def test_the_sums_of_softmaxes_are_those_of_all_logits(window):
    q, k, v = random_qkv(13, 13)
    sums = causal_attention_with_lse(q, k, v, rule=Rule(window), block=4)[1]
    s, t = np.arange(13)[None], np.arange(13)[:, None]
    is_visible = (s <= t) & (s > t - (window or 13))
    expected = np.log(np.where(is_visible, np.exp(np.einsum("bkgth,bksh->bkgts", q, k) * H**-0.5), 0).sum(-1))
    np.testing.assert_allclose(sums, expected, atol=1e-5)


@pytest.mark.parametrize("start", [0, 3, 8])
def test_a_chunk_at_an_offset_sees_all_before_it_and_nothing_after(start):
    q, k, v = random_qkv(4, 16)
    out = jax.jit(lambda s: causal_attention(q, k, v, s, block=4))(start)
    np.testing.assert_allclose(out, dense_outputs(q, k, v, start + np.arange(4)), atol=1e-6)


def test_memory_of_blockwise_attention_has_no_square_array():
    T = 2048
    shape = jax.ShapeDtypeStruct((1, 1, 1, T, 8), jnp.float32)
    kv = jax.ShapeDtypeStruct((1, 1, T, 8), jnp.float32)
    compiled = jax.jit(lambda q, k, v: causal_attention(q, k, v, block=128)).lower(shape, kv, kv).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * T * 4 / 8


def test_it_is_differentiable():
    q, k, v = random_qkv(9, 9)

    def loss(q):
        return jnp.sum(causal_attention(q, k, v, block=4) ** 2)

    eps, direction = 1e-3, jnp.ones_like(q)
    difference = float(loss(q + eps * direction)) - float(loss(q - eps * direction))
    np.testing.assert_allclose(float(jnp.vdot(jax.grad(loss)(q), direction)), difference / (2 * eps), rtol=2e-2)
