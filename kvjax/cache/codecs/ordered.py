"""Channels in the order of their size, so that large ones stand together."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.cache.codecs.base import Codec, CodecWrapper
from kvjax.core.types import Array, pytree


@pytree
class InOrder:
    """What another codec holds of rows in an order of channels."""

    rows: Any
    order: Array  # i32[B K H], the channel at each place


@dataclasses.dataclass(frozen=True)
class SortedChannels(CodecWrapper):
    """Another codec, for rows whose channels have been put in the order of their size, the largest first.

    The order is that of each row and head: by the root of the sum of squares over the tokens of a prompt, and it stays
    for what is decoded. Of equal channels the earlier comes first, so that without a prompt they stay as they are.
    Queries are put in that order where they meet keys, and mixed values are put back: products do not change.
    """

    def encode(self, x: Array, pos: Array) -> InOrder:
        real = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype)).astype(jnp.float32)
        order = jnp.argsort(-jnp.square(real).sum(2), axis=-1, stable=True).astype(jnp.int32)
        return InOrder(self.inner.encode(_put(x, order), pos), order)

    def append(self, stored: InOrder, x: Array, at: Array) -> InOrder:
        return InOrder(self.inner.append(stored.rows, _put(x, stored.order), at), stored.order)

    def decode(self, stored: InOrder) -> Array:
        return _put_back(self.inner.decode(stored.rows), stored.order)

    def gather(self, stored: InOrder, idx: Array) -> Array:
        return _put_back(self.inner.gather(stored.rows, idx), stored.order)

    def load(self, stored: InOrder) -> InOrder:
        return InOrder(self.inner.load(stored.rows), stored.order)

    def scores(self, q: Array, stored: InOrder) -> Array:
        return self.inner.scores(_put(q, stored.order), stored.rows)

    def score_in_place(self, q: Array, stored: InOrder) -> Array:
        return self.inner.score_in_place(_put(q, stored.order), stored.rows)

    def mix(self, p: Array, stored: InOrder) -> Array:
        return _put_back(self.inner.mix(p, stored.rows), stored.order)

    def num_committed(self, stored: InOrder, n: Array) -> Array:
        return self.inner.num_committed(stored.rows, n)

    def on_device(self) -> Codec:
        return SortedChannels(self.inner.on_device())

    def on_host(self) -> Codec:
        return SortedChannels(self.inner.on_host())


def _put(x: Array, order: Array) -> Array:
    """x [B K ... H] with its channels in an order i32[B K H]."""
    B, K, H = order.shape
    order = order.reshape(B, K, *[1] * (x.ndim - 3), H)
    return jnp.take_along_axis(x, order, -1)


def _put_back(x: Array, order: Array) -> Array:
    """The inverse of `_put`."""
    return _put(x, jnp.argsort(order, axis=-1).astype(jnp.int32))
