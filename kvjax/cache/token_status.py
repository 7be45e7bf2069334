"""The status of each token in a layer: whether it is held, where, and how exactly, measured on the state itself."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.protocol import BoundLayer, InspectableLayer
from kvjax.core import memory
from kvjax.core.types import Array, KVBlock


class TokenStatus(NamedTuple):
    """The status of the token at each position 0..C-1 in one layer; fields other than `held` count for held tokens."""

    held: Array  # bool[B K C]
    key: Array  # f32[B K C], relative error of the key as it is read; NaN where unknown
    value: Array  # f32[B K C], relative error of the value
    key_host: Array  # bool[B K C], whether the key is read from host memory
    value_host: Array  # bool[B K C]


def token_status(layer: BoundLayer, state: Any, exact: KVBlock) -> TokenStatus:
    """Compares a layer's state with the exact keys and values.

    Copies that a reader keeps in addition to the slots, such as those of the newest tokens, are not looked at.

    Args:
      layer: the layer. One that is no `InspectableLayer` tells which tokens it holds, and no more.
      state: of the layer.
      exact: keys and values [B K C H] of all tokens, each at its position.
    """
    B, K, C = exact.k.shape[:3]
    pos = layer.positions(state)
    pos = jnp.broadcast_to(pos, (B, K, pos.shape[2]))
    if not isinstance(layer, InspectableLayer):
        errors = (jnp.full(pos.shape, jnp.nan),) * 2
        on_host = (jnp.zeros(pos.shape, bool),) * 2
    else:
        errors = blank_errors = layer.reconstruction_error(state, exact)
        # A layer does not tell which numbers it reads from the host. An error that changes when all of host memory is
        # blank was measured on numbers from there.
        if any(memory.is_host(x) for x in jax.tree.leaves(state)):
            blank = memory.map_buffers(
                lambda x: dataclasses.replace(x, data=jnp.zeros(x.data.shape, x.data.dtype)) if x.host else x, state
            )
            blank_errors = layer.reconstruction_error(blank, exact)
        on_host = tuple((a != b) & ~jnp.isnan(a) for a, b in zip(errors, blank_errors, strict=True))
    index, by_slot = scatter_index(pos, (B, K, C)), (pos >= 0, *errors, *on_host)
    return TokenStatus(*(jnp.zeros((B, K, C), x.dtype).at[index].set(x, mode="drop") for x in by_slot))


def scatter_index(pos: Array, shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """The index of positions i32[B 1|K n] in an array [B K C ...]; a write with "drop" drops those of -1."""
    B, K, C = shape[:3]
    return jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.where(pos >= 0, pos, C)


def relative_error(read: Array, exact: Array) -> Array:
    """|read - exact| / |exact| of vectors [B K|1 S H], f32[B K S]."""
    read, exact = read.astype(jnp.float32), exact.astype(jnp.float32)
    difference, length = (jnp.sqrt(jnp.square(x).sum(-1)) for x in (read - exact, exact))
    return difference / jnp.maximum(length, 1e-30)
