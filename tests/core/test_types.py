"""Tokens gathered from blocks of keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.types import KVBlock, gather_tokens


def test_gathered_tokens_keep_their_positions():
    k = np.arange(2 * 2 * 5 * 3).reshape(2, 2, 5, 3).astype(jnp.bfloat16)
    pos = np.array([[[0, 1, 2, 3, 4]], [[0, 1, 2, -1, -1]]], np.int32)
    idx = np.array([[[1, 4], [0, 2]], [[2, -1], [0, -1]]], np.int32)
    gather = jax.jit(gather_tokens)
    out = gather(KVBlock(k, k + 1, pos), idx)
    assert np.asarray(out.pos).tolist() == [[[1, 4], [0, 2]], [[2, -1], [0, -1]]]
    np.testing.assert_array_equal(np.asarray(out.k)[0, 1], k[0, 1, [0, 2]])
    np.testing.assert_array_equal(np.asarray(out.v)[0, 0], k[0, 0, [1, 4]] + 1)
    shared = gather(KVBlock(k, k, pos), idx[:, :1])
    assert shared.pos.shape == (2, 1, 2) and shared.k.shape == (2, 2, 2, 3)
    np.testing.assert_array_equal(np.asarray(shared.k)[0, 1], k[0, 1, [1, 4]])
    per_head = gather(KVBlock(k, k, np.repeat(pos, 2, 1)), idx[:, :1])
    np.testing.assert_array_equal(per_head.pos, np.repeat(shared.pos, 2, 1))
