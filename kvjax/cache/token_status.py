"""What has become of each token: measured, by putting what a state gives back beside the keys and values that came."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.protocol import BoundLayer, InspectableLayer
from kvjax.core import memory
from kvjax.core.types import Array, KVBlock


class TokenStatus(NamedTuple):
    """Of the token at each position 0..C-1, in one layer; what is said of a token that is not held means nothing."""

    held: Array  # bool[B K C]
    key: Array  # f32[B K C], how far its key, as it is read, is from the one that came; NaN where that is not told
    value: Array  # f32[B K C], likewise
    key_host: Array  # bool[B K C], whether what is read comes from host memory
    value_host: Array  # bool[B K C]


def token_status(layer: BoundLayer, state: Any, exact: KVBlock) -> TokenStatus:
    """What a layer's state holds, and how; exact [B K C H]: the keys and values of all tokens, each at its position.

    A layer tells by `InspectableLayer.reconstruction_error`; of one without it is known which tokens it holds, and no
    more. What a reader keeps beside the slots, such as copies of the newest tokens, is not looked at.
    """
    B, K, C = exact.k.shape[:3]
    pos = layer.positions(state)
    pos = jnp.broadcast_to(pos, (B, K, pos.shape[2]))
    if not isinstance(layer, InspectableLayer):
        key = value = jnp.full(pos.shape, jnp.nan)
        hosts = (jnp.zeros(pos.shape, bool),) * 2
    else:
        key, value = layer.reconstruction_error(state, exact)
        # What changes when host memory is blank was read from there.
        blank = (
            layer.reconstruction_error(memory.map_buffers(_blank, state), exact) if _on_host(state) else (key, value)
        )
        hosts = tuple((a != b) & ~jnp.isnan(a) for a, b in zip((key, value), blank, strict=True))

    def by_position(x: Array) -> Array:
        return jnp.zeros((B, K, C), x.dtype).at[places(pos, (B, K, C))].set(x, mode="drop")

    return TokenStatus(*map(by_position, (pos >= 0, key, value, *hosts)))


def places(pos: Array, shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Where positions i32[B 1|K n] lie in an array [B K C ...]: an index, of -1 one that a write with "drop" drops."""
    B, K, C = shape[:3]
    return jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.where(pos >= 0, pos, C)


def relative_error(read: Array, came: Array) -> Array:
    """Rows [B K|1 S H] as they are read and as they came -> the length of the difference over the row's own, f32."""
    read, came = read.astype(jnp.float32), came.astype(jnp.float32)
    difference, length = (jnp.sqrt(jnp.square(x).sum(-1)) for x in (read - came, came))
    return difference / jnp.maximum(length, 1e-30)


def _on_host(state: Any) -> bool:
    return any(memory.is_host(x) for x in jax.tree.leaves(state))


def _blank(buffer: memory.Buffer) -> memory.Buffer:
    """Zeros in the place of a buffer on the host."""
    if not buffer.host:
        return buffer
    return memory.Buffer(jnp.zeros(buffer.data.shape, buffer.data.dtype), buffer.dtype)
