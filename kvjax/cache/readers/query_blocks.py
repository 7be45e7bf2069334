"""The common parts of readers: logits of stored keys, and queries a block at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.protocol import LayerState
from kvjax.cache.storage import KVStorage
from kvjax.core.attention import scores, split_blocks
from kvjax.core.types import Array
from kvjax.errors import KvjaxError

QUERY_BLOCK = 512
"""Queries that attend to all slots at a time, so that a long chunk needs no T x S array of logits."""


def logits(storage: KVStorage, state: LayerState, q: Array, q_pos: Array, keys: Any) -> Array:
    """f32[B K G T S]: the logits of all keys (in device memory), MASKED_LOGIT where hidden."""
    if storage.indexed_by is not None:
        # Keys are stored before RoPE; keys and queries are rotated to their index in the cache (StreamingLLM).
        rope, index_of = storage.spec.rope, storage.indexed_by.cache_positions
        rotated_k = rope.rotate(storage.k.decode(keys), index_of(state.pos, state.pos))
        query_index = index_of(state.pos, q_pos[:, None])[:, 0]
        rotated_q = rope.rotate_queries(rope.unrotate_queries(q, q_pos), query_index)
        s = scores(rotated_q, rotated_k)
    elif storage.k.pre_rope:  # the codec's own `scores` would multiply keys that are not rotated yet
        s = scores(q, storage.decode_keys(keys, state.pos))
    else:
        s = storage.k.scores(q, keys)
    if state.bias is not None:
        expected = (*s.shape[:2], s.shape[4])
        if state.bias.shape != expected:
            raise KvjaxError(
                f"`state.bias` is added to the logits of slots, and must be f32[B K S], here {expected}; got "
                f"{jax.typeof(state.bias)}"
            )
    return storage.spec.rule.logits(s, state.pos, q_pos, state.bias)


def normalize_weights(p: Array, l: Array) -> Array | None:
    """The softmax weights of a single query, from exponentials and sum; None for several, which no policy asks for."""
    return p / jnp.maximum(l, 1e-30)[..., None] if p.shape[3] == 1 else None


def map_query_blocks(attend: Callable[..., Any], q: Array, q_pos: Array, n: int, *more: Array) -> Any:
    """Computes attend(q, q_pos, *more) for n queries at a time, one block after the other.

    `attend` returns a pytree of arrays [B K G T ...], such as a Partial; `more` are further arrays [B K G T ...].
    """
    T = q.shape[3]
    if T <= n:
        return attend(q, q_pos, *more)
    blocks = split_blocks(q, 3, n), split_blocks(q_pos, 1, n, -1), *(split_blocks(x, 3, n) for x in more)

    def join_blocks(x: Array) -> Array:  # [count B K G n ...] -> [B K G T ...]
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, :T]

    # `map`, not `vmap`, which would hold the logits of all blocks at once.
    return jax.tree.map(join_blocks, lax.map(lambda block: attend(*block), blocks))
