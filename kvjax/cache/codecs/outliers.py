"""Numbers that are held as they came, beside the codes of all others: the extremes of each token or channel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.cache.eviction.representatives import IntOrArray, check_share, fraction_of
from kvjax.core import memory
from kvjax.core.top_k import mask_to_slots, top_k_mask
from kvjax.core.types import Array, pytree


@dataclasses.dataclass(frozen=True)
class Outliers:
    """The base: of each vector of n numbers the floor(share / 2 * n) largest and as many of the smallest.

    Of equal numbers the first count. While the others are coded, the mean of its vector stands in an outlier's place.
    mean_of_all: whether that is the mean with outliers, or without them, which widens no range.
    """

    share: float = 0.02

    mean_of_all = True

    def __post_init__(self):
        check_share(self.share)

    def on_a_side(self, length: IntOrArray) -> IntOrArray:
        """How many of the largest, and of the smallest, of so many numbers are outliers."""
        return fraction_of(self.share / 2, length)

    def places(self, length: int) -> int:
        """Outliers of a vector of so many numbers."""
        return 2 * self.on_a_side(length)

    def found(self, x: Array, real: Array) -> tuple[Array, Array]:
        """Tokens x [B K n H], those that are real bool[B K n] -> (which numbers are outliers, x without them)."""
        raise NotImplementedError

    def begin(self, x: Array, out: Array, every: int) -> Any:
        """The store of a prompt's outliers `out`, with room for those of chunks of `every` tokens behind it."""
        raise NotImplementedError

    def add(self, stored: Any, x: Array, out: Array, at: Array, chunk: Array, slots: int, due: Array) -> Any:
        """With those of a chunk [B K every H] in slots from at i32[B 1] on, of the rows that are due bool[B].

        chunk i32[B 1]: which it is behind the prompt. slots: of the cache.
        """
        raise NotImplementedError

    def restored(self, stored: Any, rows: Array, idx: Array, slots: int) -> Array:
        """Rows [B K n H] of slots idx i32[B K n], with their outliers in place."""
        raise NotImplementedError

    def _extremes(self, vectors: Array, real: Array) -> tuple[Array, Array]:
        """`found` for vectors [B K V n], of which some numbers are real bool[B K V n]."""
        x, count = vectors.astype(jnp.float32), self.on_a_side(real.sum(-1, dtype=jnp.int32))
        largest = top_k_mask(x, real, count)
        out = largest | top_k_mask(-x, real & ~largest, count)
        counts = real if self.mean_of_all else real & ~out
        total = jnp.where(counts, x, 0.0).sum(-1, keepdims=True)
        mean = total / jnp.maximum(counts.sum(-1, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        return out, jnp.where(out, mean.astype(vectors.dtype), vectors)


@pytree
class OfTokens:
    """The outliers of each token: in which channels, and what they are."""

    at: memory.Buffer  # uint8 or uint16 [B K S N]
    value: memory.Buffer  # [B K S N]


class ByToken(Outliers):
    """Each token's row of a head is a vector."""

    def found(self, x: Array, real: Array) -> tuple[Array, Array]:
        return self._extremes(x, jnp.broadcast_to(real[..., None], x.shape))

    def begin(self, x: Array, out: Array, every: int) -> OfTokens | None:
        return OfTokens(*map(memory.pack, self._listed(x, out))) if self.places(x.shape[3]) else None

    def add(
        self, stored: OfTokens | None, x: Array, out: Array, at: Array, chunk: Array, slots: int, due: Array
    ) -> OfTokens | None:
        if stored is None:
            return None
        channel, value = self._listed(x, out)
        return OfTokens(memory.append(stored.at, channel, at, due), memory.append(stored.value, value, at, due))

    def restored(self, stored: OfTokens | None, rows: Array, idx: Array, slots: int) -> Array:
        if stored is None:
            return rows
        at, value = memory.gather_tokens(stored.at, idx), memory.gather_tokens(stored.value, idx)
        channel = jnp.arange(rows.shape[3], dtype=jnp.int32)[None, None, None, None]
        here = at.astype(jnp.int32)[..., None] == channel
        return jnp.where(here.any(3), jnp.take_along_axis(value, jnp.argmax(here, 3), 3), rows)

    def _listed(self, x: Array, out: Array) -> tuple[Array, Array]:
        """Channels and values of the outliers, [B K n N]."""
        B, K, n, H = x.shape
        at = mask_to_slots(out.reshape(B, K * n, H), self.places(H)).reshape(B, K, n, -1)
        at = jnp.maximum(at, 0)  # of a slot without a token
        return at.astype(jnp.uint8 if H <= 256 else jnp.uint16), jnp.take_along_axis(x, at, 3)


@pytree
class OfChannels:
    """The outliers of each channel, of the prompt's tokens and then of each chunk's: in which slots, and what."""

    at: Array  # i32[B K N H], -1 where there is none
    value: Array  # [B K N H]


class ByChannel(Outliers):
    """The numbers that tokens have in a channel of a head are a vector."""

    def found(self, x: Array, real: Array) -> tuple[Array, Array]:
        vectors = x.swapaxes(2, 3)
        out, without = self._extremes(vectors, jnp.broadcast_to(real[:, :, None], vectors.shape))
        return out.swapaxes(2, 3), without.swapaxes(2, 3)

    def begin(self, x: Array, out: Array, every: int) -> OfChannels | None:
        if not self.places(x.shape[2]):
            return None
        at, value = self._listed(x, out)
        chunks = x.shape[2] // every if every else 0
        more = [(0, 0), (0, 0), (0, chunks * self.places(every)), (0, 0)]
        return OfChannels(jnp.pad(at, more, constant_values=-1), jnp.pad(value, more))

    def add(
        self, stored: OfChannels | None, x: Array, out: Array, at: Array, chunk: Array, slots: int, due: Array
    ) -> OfChannels | None:
        each = self.places(x.shape[2])
        if stored is None or not each:
            return stored
        place, value = self._listed(x, out)
        slot = jnp.where(place >= 0, place + at[:, :, None, None], -1)
        first = self.places(slots) + chunk * each
        first = jnp.where(due[:, None], first, stored.at.shape[2])  # what lies outside is dropped
        return OfChannels(memory.put(stored.at, slot, first), memory.put(stored.value, value, first))

    def restored(self, stored: OfChannels | None, rows: Array, idx: Array, slots: int) -> Array:
        if stored is None:
            return rows
        B, K, N, H = stored.at.shape
        where = (
            jnp.arange(B, dtype=jnp.int32)[:, None, None, None],
            jnp.arange(K, dtype=jnp.int32)[None, :, None, None],
            jnp.where(stored.at >= 0, stored.at, slots),
            jnp.arange(H, dtype=jnp.int32)[None, None, None],
        )
        number = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[None, None, :, None], stored.at.shape)
        which = jnp.full((B, K, slots, H), -1, jnp.int32).at[where].set(number, mode="drop")  # outlier of each slot
        which = memory.take(which, idx)
        exact = jnp.take_along_axis(stored.value, jnp.maximum(which, 0), 2)
        return jnp.where(which >= 0, exact, rows)

    def _listed(self, x: Array, out: Array) -> tuple[Array, Array]:
        """Places among the tokens, -1 where there is none, and values of the outliers, [B K N H]."""
        B, K, n, H = x.shape
        at = mask_to_slots(out.swapaxes(2, 3).reshape(B, K * H, n), self.places(n))
        at = at.reshape(B, K, H, -1).swapaxes(2, 3)
        return at, jnp.take_along_axis(x, jnp.maximum(at, 0), 2)
