"""A-shape prompt attention against its oracle: in blocks, in chunks, in a model's last layer; decoding reads all.

A-shape prompt attention in NumPy, float64 (arXiv 2407.02490, section 3): one sequence, query by query.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core.attention import attend_dense, causal_attention, merge
from kvjax.core.types import KVBlock
from kvjax.engine.positions import token_positions
from kvjax.methods.a_shape import AShape
from kvjax.models.decoder import Decoder
from kvjax.testing import toy_model


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=2)


def visible_tokens(t: int, sinks: int, recent: int) -> list[int]:
    """The positions that the query at t reads."""
    return sorted(set(range(min(sinks, t + 1))) | set(range(max(t - recent + 1, 0), t + 1)))


def oracle_attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: int, recent: int) -> np.ndarray:
    """Attends under the pattern: q [K G T H], k, v [K T H] -> [K G T H]."""
    out = np.empty(q.shape)
    for t in range(q.shape[2]):
        visible = visible_tokens(t, sinks, recent)
        logits = np.einsum("kgh,ksh->kgs", q[:, :, t], k[:, visible]) / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[:, :, t] = np.einsum("kgs,ksh->kgh", weights / weights.sum(-1, keepdims=True), v[:, visible])
    return out


B, K, G, H = 2, 2, 2, 4


def random_qkv(T: int):
    rng = np.random.default_rng(T)
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((B, K, G, T, H), (B, K, T, H), (B, K, T, H)))


def oracle_outputs(q, k, v, sinks: int, recent: int) -> np.ndarray:
    sequences = zip(*(np.asarray(x, np.float64) for x in (q, k, v)), strict=True)
    return np.stack([oracle_attend(*prompt, sinks, recent) for prompt in sequences])


def test_a_query_reads_the_sinks_and_those_just_before_it():
    assert visible_tokens(5, 1, 2) == [0, 4, 5]
    assert [s for s in range(6) if bool(AShape(1, 2).is_visible(jnp.int32(s), jnp.int32(5)))] == [0, 4, 5]


@pytest.mark.parametrize("block", [1, 3, 5, 64])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 1), (1, 2), (4, 3), (2, 9), (40, 1)])
def test_blockwise_attention_is_the_dense_one_under_the_mask(block, sinks, recent):
    q, k, v = random_qkv(14)
    actual = causal_attention(q, k, v, block=block, pattern=AShape(sinks, recent))
    np.testing.assert_allclose(actual, oracle_outputs(q, k, v, sinks, recent), atol=1e-6)


def test_what_a_block_says_of_itself_is_true_of_its_pairs():
    pattern = AShape(3, 4)
    for first, start in np.ndindex(12, 12):
        last, end = first + 2, start + 3
        pairs = [s in visible_tokens(t, 3, 4) for s in range(first, last + 1) for t in range(start, end + 1) if s <= t]
        any_visible, all_visible = (
            bool(x) for x in pattern.block_visibility(*(jnp.int32(x) for x in (first, last, start, end)))
        )
        assert any_visible >= any(pairs) and all_visible <= all(pairs)
        if last <= start:
            assert any_visible == any(pairs) and all_visible == all(pairs)


def test_blocks_that_no_query_reads_are_skipped():
    q, k, v = random_qkv(16)
    pattern = AShape(2, 4)
    unread = v.at[:, :, 2:4].set(jnp.nan)  # of the last queries: masked, it would still make their mix NaN
    out = causal_attention(q, k, unread, block=2, pattern=pattern)
    np.testing.assert_array_equal(out[:, :, :, 8:], causal_attention(q, k, v, block=2, pattern=pattern)[:, :, :, 8:])


@pytest.mark.parametrize("start", [0, 5, 9])
def test_a_chunk_at_an_offset_reads_as_in_the_whole(start):
    q, k, v = random_qkv(14)
    actual = causal_attention(q[:, :, :, start : start + 4], k, v, start, block=3, pattern=AShape(2, 3))
    np.testing.assert_allclose(actual, oracle_outputs(q, k, v, 2, 3)[:, :, :, start : start + 4], atol=1e-6)


def test_the_few_queries_of_a_last_layer_read_by_the_same_mask():
    q, k, v = random_qkv(14)
    ask = jnp.array([[10, 13], [-1, 4]])
    pos = jnp.where(jnp.arange(14)[None] < jnp.array([[14], [5]]), jnp.arange(14)[None], -1)
    few = jnp.take_along_axis(q, jnp.maximum(ask, 0)[:, None, None, :, None], 3)
    actual = merge([attend_dense(few, KVBlock(k, v, pos[:, None]), ask, pattern=AShape(1, 3))])
    expected = oracle_outputs(q, k, v, 1, 3)
    np.testing.assert_allclose(actual[0], expected[0][:, :, np.array([10, 13])], atol=1e-6)
    np.testing.assert_allclose(actual[1, :, :, 1], expected[1][:, :, 4], atol=1e-6)


PROMPTS = [[5, 9, 2, 44, 8, 13, 21, 60, 3, 31, 77], [7, 3, 90, 14], [6]]
METHOD = "a_shape:sinks=1,recent=3"


def masked_logits(tokens: list[int], reads_all_from: int | None = None) -> np.ndarray:
    """The model's logits f32[T V] under the oracle's attention; queries from a position on read all earlier tokens."""
    T = len(tokens)
    reads_all_from = T if reads_all_from is None else reads_all_from
    mask = np.zeros((T, T), bool)
    for t in range(T):
        mask[t, visible_tokens(t, 1, 3) if t < reads_all_from else np.arange(t + 1)] = True

    def attend(i, q, k, v, x):
        s = jnp.einsum("bkgth,bksh->bkgts", q, k) / np.float32(np.sqrt(q.shape[-1]))
        s = jnp.where(mask[None, None, None], s, -jnp.inf)
        p = jnp.exp(s - s.max(-1, keepdims=True))
        return jnp.einsum("bkgts,bksh->bkgth", p / p.sum(-1, keepdims=True), v), None

    tokens = jnp.asarray([tokens], jnp.int32)
    decoder, pos = Decoder(make_model().config, jnp.float32), token_positions(tokens)
    out = decoder.apply({"params": make_model().params}, tokens, pos, attend, method=Decoder.logits)[0]
    return np.asarray(out[0])


@pytest.mark.parametrize(
    ("more_methods", "chunk"), [("", None), ("", 4), (" + snapkv:budget=40,window=2,kernel=1", None)]
)
def test_a_prompt_of_a_model_is_read_by_the_pattern(more_methods, chunk):
    out, _ = kvjax.prefill(make_model(), PROMPTS, METHOD + more_methods, chunk=chunk)
    for actual, prompt in zip(np.asarray(out), PROMPTS, strict=True):
        np.testing.assert_allclose(actual, masked_logits(prompt)[-1], atol=2e-5)


def test_decoding_reads_everything():
    more = [[4, 8, 15], [16, 23, 42], [1, 2, 3]]
    _, cache = kvjax.prefill(make_model(), PROMPTS, METHOD, capacity=32)
    out, cache = kvjax.extend(make_model(), more, cache)
    for b, (prompt, after) in enumerate(zip(PROMPTS, more, strict=True)):
        np.testing.assert_allclose(out[b], masked_logits(prompt + after, len(prompt))[len(prompt) :], atol=2e-5)
    assert [len(x) for x in (heads[0] for heads in kvjax.kept_positions(cache)[0])] == [14, 7, 4]


def test_a_window_that_holds_the_prompt_is_exact():
    exact, _ = kvjax.prefill(make_model(), PROMPTS, "full")
    wide, _ = kvjax.prefill(make_model(), PROMPTS, "a_shape:sinks=0,recent=11")
    np.testing.assert_allclose(wide, exact, atol=1e-5)
