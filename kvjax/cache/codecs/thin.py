"""Keys without the channels that matter least to a prompt's last queries."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.codecs.prompt_adaptive import PromptAdaptiveKeys
from kvjax.cache.eviction.representatives import fraction_of
from kvjax.cache.eviction.scorers import window_query_mask
from kvjax.core import attention, memory
from kvjax.core.attention_mass import Observation
from kvjax.core.top_k import top_k_mask
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError


@pytree
class Few:
    """Some channels of all slots."""

    rows: memory.Buffer  # [B K S C]
    channels: Array  # i32[B K 1 C], ascending
    H: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class ChannelPruner(PromptAdaptiveKeys):
    """Each head drops the `share` of its key channels, rounded down, that score lowest (ThinK, 2407.21018, section 3).

    A channel's score is the mean square of it in a row's last `num_queries` queries, over the query heads too, times
    the mean square of it in the keys. What is dropped counts as zero, and logits are over the root of H as before.
    """

    share: float = 0.4
    num_queries: int = 32

    is_smooth = True

    def __post_init__(self):
        if not 0 <= self.share < 1:
            raise KvjaxError(f"the share of channels that are dropped must lie in [0, 1), got {self.share}; use 0.4")
        if self.num_queries < 1:
            raise KvjaxError(f"channels are chosen by at least 1 query, got queries={self.num_queries}; ThinK uses 32")

    def fit_prompt(self, x: Array, pos: Array, observation: Observation) -> Array:
        """i32[B K 1 C]: the channels that stay; of equal ones the lower."""
        H = x.shape[3]
        asking = window_query_mask(observation, self.num_queries)[:, None, None, :, None]
        score = _mean_square(observation.q, asking, (2, 3)) * _mean_square(x, (pos >= 0)[..., None], (2,))
        kept = H - fraction_of(self.share, H)
        stays = top_k_mask(score, jnp.ones((), bool), jnp.full(score.shape[:1], kept, jnp.int32))
        channel = jnp.arange(H, dtype=jnp.int32)[None, None]
        return jnp.sort(jnp.where(stays, channel, H), -1)[:, :, None, :kept]

    def encode_with(self, x: Array, pos: Array, found: Array) -> Few:
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        return Few(memory.pack(_picked(x, found)), found, x.shape[3])

    def decode(self, stored: Few) -> Array:
        return self._widened(memory.unpack(stored.rows), stored)

    def append(self, stored: Few, x: Array, at: Array) -> Few:
        return dataclasses.replace(stored, rows=memory.append(stored.rows, _picked(x, stored.channels), at))

    def gather(self, stored: Few, idx: Array) -> Array:
        return self._widened(memory.gather_tokens(stored.rows, idx), stored)

    def scores(self, q: Array, stored: Few) -> Array:
        """Of a query, the same channels."""
        rows = memory.unpack(stored.rows)
        s = attention.scores(_picked(q, stored.channels[:, :, None]), rows)
        return s * (rows.shape[3] / stored.H) ** 0.5  # the root of H in place of that of C

    def num_quantized(self, n: Array) -> Array:
        return n

    def _widened(self, rows: Array, stored: Few) -> Array:
        """Rows [B K n C] with zeros in the channels that were dropped: [B K n H]."""
        channel = jnp.arange(stored.H, dtype=jnp.int32)[None, None, None]
        place = (stored.channels < channel.swapaxes(2, 3)).sum(3, dtype=jnp.int32)[:, :, None]
        stays = (stored.channels == channel.swapaxes(2, 3)).any(3)[:, :, None]
        found = _picked(rows, jnp.minimum(place, rows.shape[3] - 1))
        return jnp.where(stays, found, jnp.zeros((), rows.dtype))


def _mean_square(x: Array, real: Array, axes: tuple[int, ...]) -> Array:
    """The mean of x * x over these axes, where `real`: f32[B K H]."""
    square = jnp.where(real, jnp.square(x.astype(jnp.float32)), 0.0).sum(axes)
    number = jnp.broadcast_to(real, x.shape).sum(axes, dtype=jnp.float32)
    return square / jnp.maximum(number, 1.0)


def _picked(x: Array, channels: Array) -> Array:
    """x [... H] at the channels i32[... C], of which axes of size 1 stand for all."""
    at = jnp.broadcast_to(channels, (*x.shape[:-1], channels.shape[-1]))
    return jnp.take_along_axis(x, at, -1, mode="promise_in_bounds")
