"""Skip softmax against its oracle: in blocks, in chunks, for the few queries of a model's last layer.

BLASST in NumPy, float64, from its rule (arXiv 2512.12087, and NVIDIA's Model-Optimizer): one query, tile by tile.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core.attention import attend_dense, causal_attention, merge
from kvjax.core.types import KVBlock
from kvjax.methods.skip_softmax import SkippedTiles
from kvjax.testing import toy_model

B, K, G, H = 2, 2, 2, 4


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, threshold: float, tile: int) -> tuple[np.ndarray, int]:
    """The output [H] of a query [H] over keys and values [S H], and the number of tiles that it skips."""
    running, weight, out, num_skipped = -np.inf, 0.0, np.zeros(v.shape[1]), 0
    for start in range(0, len(k), tile):
        logits = k[start : start + tile] @ q / np.sqrt(len(q))
        if np.exp(logits.max() - max(running, logits.max())) < threshold:
            num_skipped += 1
            continue
        largest = max(running, logits.max())
        p, shrink = np.exp(logits - largest), np.exp(running - largest)
        weight, out = weight * shrink + p.sum(), out * shrink + p @ v[start : start + tile]
        running = largest
    return out / weight, num_skipped


def random_qkv(T: int):
    rng = np.random.default_rng(T)
    shapes = (B, K, G, T, H), (B, K, T, H), (B, K, T, H)
    return tuple(jnp.asarray(rng.normal(size=s) * 2, jnp.float32) for s in shapes)


def oracle_outputs(q, k, v, threshold: float, tile: int) -> tuple[np.ndarray, int]:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, num_skipped = np.empty(q.shape), 0
    for b, h, g, t in np.ndindex(q.shape[:4]):
        out[b, h, g, t], skipped = attend(q[b, h, g, t], k[b, h, : t + 1], v[b, h, : t + 1], threshold, tile)
        num_skipped += skipped
    return out, num_skipped


def test_a_query_by_hand():
    """Three tiles of one key with logits 2, 0 and 1: under a threshold of 0.3 the second is skipped."""
    out, num_skipped = attend(np.ones(1), np.array([[2.0], [0.0], [1.0]]), np.array([[1.0], [9.0], [2.0]]), 0.3, 1)
    assert num_skipped == 1
    np.testing.assert_allclose(out, (1 + 2 * np.exp(-1)) / (1 + np.exp(-1)))


@pytest.mark.parametrize("block", [3, 64])
@pytest.mark.parametrize(("threshold", "tile"), [(0.0, 2), (0.2, 1), (0.5, 4), (0.9, 32)])
def test_blockwise_attention_is_the_oracles(block, threshold, tile):
    q, k, v = random_qkv(14)
    expected, num_skipped = oracle_outputs(q, k, v, threshold, tile)
    assert (num_skipped > 0) == (0 < threshold and tile < 14)
    actual = causal_attention(q, k, v, block=block, pattern=SkippedTiles(threshold, tile))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_a_chunk_and_the_few_queries_of_a_last_layer_skip_the_same():
    q, k, v = random_qkv(14)
    pattern, (expected, _) = SkippedTiles(0.3, 3), oracle_outputs(q, k, v, 0.3, 3)
    chunk = causal_attention(q[:, :, :, 5:9], k, v, 5, block=2, pattern=pattern)
    np.testing.assert_allclose(chunk, expected[:, :, :, 5:9], atol=1e-5)
    ask = jnp.array([[10, 13], [-1, 4]])
    pos = jnp.where(jnp.arange(14)[None] < jnp.array([[14], [5]]), jnp.arange(14)[None], -1)
    few = jnp.take_along_axis(q, jnp.maximum(ask, 0)[:, None, None, :, None], 3)
    actual = merge([attend_dense(few, KVBlock(k, v, pos[:, None]), ask, pattern=pattern)])
    np.testing.assert_allclose(actual[0], expected[0][:, :, np.array([10, 13])], atol=1e-5)
    np.testing.assert_allclose(actual[1, :, :, 1], expected[1][:, :, 4], atol=1e-5)


def test_values_are_left_out_where_all_queries_of_a_block_skip_their_tile():
    q, k, v = random_qkv(16)
    k = k.at[:, :, 4:8].multiply(0.0).at[:, :, 0].set(0.0).at[:, :, 0, 0].set(60.0)
    q = q.at[..., 0].set(4.0)  # each query gives the first token almost all of its weight
    unread = v.at[:, :, 4:8].set(jnp.nan)  # masked by weights, it would still make their mix NaN
    pattern = SkippedTiles(0.5, 4)
    out = causal_attention(q, k, unread, block=4, pattern=pattern)
    np.testing.assert_array_equal(out, causal_attention(q, k, v, block=4, pattern=pattern))
    assert not np.isnan(out).any()


PROMPTS = [[5, 9, 2, 44, 8, 13, 21, 60, 3, 31, 77], [7, 3, 90, 14], [6]]


def test_a_prompt_of_a_model_is_read_alike_whole_in_chunks_and_alone():
    model, method = toy_model(layers=2), "skip_softmax:threshold=0.8,tile=2"
    whole, _ = kvjax.prefill(model, PROMPTS, method)
    chunked, _ = kvjax.prefill(model, PROMPTS, method, chunk=4)
    alone, _ = kvjax.prefill(model, PROMPTS[1:2], method)
    np.testing.assert_allclose(chunked, whole, atol=1e-5)
    np.testing.assert_allclose(alone[0], whole[1], atol=1e-5)
    exact, _ = kvjax.prefill(model, PROMPTS, "full")
    assert np.abs(np.asarray(whole[0] - exact[0])).max() > 1e-3
