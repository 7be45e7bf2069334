"""Outliers: the extreme numbers of each token or channel, which are stored exactly next to the codes of all others."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.cache.eviction.representatives import IntOrArray, fraction_of
from kvjax.core import memory
from kvjax.core.top_k import mask_to_slots, top_k_mask
from kvjax.core.types import Array, pytree
from kvjax.utils.abstract import abstract
from kvjax.utils.parameter_types import UnitFloat, check_fields


@dataclasses.dataclass(frozen=True)
class Outliers:
    """The base: the floor(share / 2 * n) largest of each vector of n numbers are outliers, and as many of the smallest.

    Ties go to the earlier number. While the other numbers are quantized, a mean stands in the place of each outlier.

    Args:
      share: fraction of a vector's numbers that are outliers.
    """

    share: UnitFloat = 0.02

    mean_of_all = True  # whether that mean includes the outliers; without them it widens no range

    __post_init__ = check_fields

    def num_per_side(self, length: IntOrArray) -> IntOrArray:
        """The number of outliers among the largest numbers of a vector, and among the smallest."""
        return fraction_of(self.share / 2, length)

    def num_outliers(self, length: int) -> int:
        """Outliers of a vector of `length` numbers."""
        return 2 * self.num_per_side(length)

    @abstract
    def find(self, x: Array, real: Array) -> tuple[Array, Array]:
        """Finds the outliers of the real tokens, bool[B K n], of x [B K n H]: bool[B K n H], and x with means there."""
        ...

    @abstract
    def init_state(self, x: Array, is_outlier: Array, every: int) -> Any:
        """Stores the outliers of a prompt x [B K S H], with room for those of later chunks of `every` tokens."""
        ...

    @abstract
    def list_outliers(self, x: Array, is_outlier: Array) -> tuple[Array, Array]:
        """Lists the outliers of tokens x [B K n H]: their places and values, whose shapes `init_state` has, too."""
        ...

    @abstract
    def add(self, stored: Any, listed: tuple[Array, Array], at: Array, chunk: Array, is_due: Array) -> Any:
        """Adds the listed outliers of chunk i32[B 1] after the prompt, which begins in slot at i32[B 1].

        Only sequences that are due, bool[B], have a full chunk; the others stay as they are.
        """
        ...

    @abstract
    def insert(self, stored: Any, x: Array, idx: Array | None) -> Array:
        """Inserts the outliers into restored tokens x [B K n H] of slots idx i32[B K n]; None for all, in order."""
        ...

    def _find_extremes(self, vectors: Array, real: Array) -> tuple[Array, Array]:
        """`find` for vectors [B K V n], whose numbers are real where bool[B K V n]."""
        # The count follows the real tokens of each sequence and not the padded length, so that padding changes nothing.
        x, count = vectors.astype(jnp.float32), self.num_per_side(real.sum(-1, dtype=jnp.int32))
        largest = top_k_mask(x, real, count)
        # The second search leaves out what the first took: a short vector of equal numbers would give some twice.
        is_outlier = largest | top_k_mask(-x, real & ~largest, count)
        counts = real if self.mean_of_all else real & ~is_outlier
        total = jnp.where(counts, x, 0.0).sum(-1, keepdims=True)
        mean = total / jnp.maximum(counts.sum(-1, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        return is_outlier, jnp.where(is_outlier, mean.astype(vectors.dtype), vectors)


@pytree
class TokenOutlierState:
    """The N outliers of each token."""

    channel: memory.Buffer  # uint8 or uint16 [B K S N]
    value: memory.Buffer  # [B K S N]


class TokenOutliers(Outliers):
    """Outliers among the channels of each token of a head."""

    def find(self, x: Array, real: Array) -> tuple[Array, Array]:
        return self._find_extremes(x, jnp.broadcast_to(real[..., None], x.shape))

    def init_state(self, x: Array, is_outlier: Array, every: int) -> TokenOutlierState | None:
        if not self.num_outliers(x.shape[3]):
            return None
        return TokenOutlierState(*map(memory.pack, self.list_outliers(x, is_outlier)))

    def add(
        self, stored: TokenOutlierState | None, listed: tuple[Array, Array], at: Array, chunk: Array, is_due: Array
    ) -> TokenOutlierState | None:
        if stored is None:
            return None
        channel, value = listed
        return TokenOutlierState(
            memory.append(stored.channel, channel, at, is_due), memory.append(stored.value, value, at, is_due)
        )

    def insert(self, stored: TokenOutlierState | None, x: Array, idx: Array | None) -> Array:
        if stored is None:
            return x
        buffers = stored.channel, stored.value
        outlier_channel, value = (memory.unpack(b) if idx is None else memory.gather_tokens(b, idx) for b in buffers)
        outlier_channel = outlier_channel.astype(jnp.int32)
        channel = jnp.arange(x.shape[3], dtype=jnp.int32)[None, None, None]
        # One outlier after the other, as a token has few: a scatter of single numbers is slow on every backend, and so
        # is a gather. Ties of unused entries go to the first one.
        for i in reversed(range(value.shape[3])):
            x = jnp.where(outlier_channel[..., i, None] == channel, value[..., i, None], x)
        return x

    def list_outliers(self, x: Array, is_outlier: Array) -> tuple[Array, Array]:
        """Channels and values of the outliers, [B K n N]."""
        B, K, n, H = x.shape
        channel = mask_to_slots(is_outlier.reshape(B, K * n, H), self.num_outliers(H)).reshape(B, K, n, -1)
        channel = jnp.maximum(channel, 0)  # a slot without a token has no outliers
        # A byte for the channel: an outlier of a 16-bit cache then costs 3 bytes, and not 6.
        return channel.astype(jnp.uint8 if H <= 256 else jnp.uint16), jnp.take_along_axis(x, channel, 3)


@pytree
class ChannelOutlierState:
    """The N outliers of each channel: those among the prompt's tokens, then those of each chunk."""

    slot: Array  # i32[B K N H], -1 where unused
    value: Array  # [B K N H]
    num_slots: int = dataclasses.field(metadata={"static": True})  # of the cache


class ChannelOutliers(Outliers):
    """Outliers among the tokens of each channel of a head."""

    def find(self, x: Array, real: Array) -> tuple[Array, Array]:
        vectors = x.swapaxes(2, 3)
        is_outlier, with_means = self._find_extremes(vectors, jnp.broadcast_to(real[:, :, None], vectors.shape))
        return is_outlier.swapaxes(2, 3), with_means.swapaxes(2, 3)

    def init_state(self, x: Array, is_outlier: Array, every: int) -> ChannelOutlierState | None:
        S = x.shape[2]
        if not self.num_outliers(S):
            return None
        slot, value = self.list_outliers(x, is_outlier)
        num_chunks = S // every if every else 0
        padding = [(0, 0), (0, 0), (0, num_chunks * self.num_outliers(every)), (0, 0)]
        return ChannelOutlierState(jnp.pad(slot, padding, constant_values=-1), jnp.pad(value, padding), S)

    def add(
        self, stored: ChannelOutlierState | None, listed: tuple[Array, Array], at: Array, chunk: Array, is_due: Array
    ) -> ChannelOutlierState | None:
        if stored is None or not (num_added := listed[0].shape[2]):
            return stored
        index, value = listed
        slot = jnp.where(index >= 0, index + at[:, :, None, None], -1)
        start = self.num_outliers(stored.num_slots) + chunk * num_added
        start = jnp.where(is_due[:, None], start, stored.slot.shape[2])  # `put` drops what lies outside
        return dataclasses.replace(
            stored, slot=memory.put(stored.slot, slot, start), value=memory.put(stored.value, value, start)
        )

    def insert(self, stored: ChannelOutlierState | None, x: Array, idx: Array | None) -> Array:
        if stored is None:
            return x
        B, K, N, H = stored.slot.shape
        place = (
            jnp.arange(B, dtype=jnp.int32)[:, None, None, None],
            jnp.arange(K, dtype=jnp.int32)[None, :, None, None],
            jnp.where(stored.slot >= 0, stored.slot, stored.num_slots),
            jnp.arange(H, dtype=jnp.int32)[None, None, None],
        )
        if idx is None:
            return x.at[place].set(stored.value, mode="drop")
        # Inverts the list into the outlier of each slot and channel: a comparison of these slots with all outliers
        # would be quadratic in the prompt's length.
        outlier = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[None, None, :, None], stored.slot.shape)
        of_slot = jnp.full((B, K, stored.num_slots, H), -1, jnp.int32).at[place].set(outlier, mode="drop")
        of_slot = memory.take(of_slot, idx)
        return jnp.where(of_slot >= 0, jnp.take_along_axis(stored.value, jnp.maximum(of_slot, 0), 2), x)

    def list_outliers(self, x: Array, is_outlier: Array) -> tuple[Array, Array]:
        """Indices among the tokens, -1 where unused, and values of the outliers, [B K N H]."""
        B, K, n, H = x.shape
        index = mask_to_slots(is_outlier.swapaxes(2, 3).reshape(B, K * H, n), self.num_outliers(n))
        index = index.reshape(B, K, H, -1).swapaxes(2, 3)
        return index, jnp.take_along_axis(x, jnp.maximum(index, 0), 2)
