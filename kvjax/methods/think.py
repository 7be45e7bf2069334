"""ThinK: drops the key channels of a prompt that its last queries need least."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.codecs.plain import Plain
from kvjax.cache.codecs.prompt_adaptive import PromptAdaptiveKeys, PromptAdaptiveTiers
from kvjax.cache.components import Codec
from kvjax.cache.eviction.representatives import fraction_of
from kvjax.cache.eviction.scorers import window_query_mask
from kvjax.cache.method import Method
from kvjax.core import attention, memory
from kvjax.core.attention_mass import Observation
from kvjax.core.top_k import top_k_mask
from kvjax.core.types import Array, KVBlock, pytree
from kvjax.errors import KvjaxError
from kvjax.registry.registration import register_method


@pytree
class PrunedKeys:
    """The keys of all slots, in the channels that each head keeps."""

    kept: memory.Buffer  # [B K S C]
    channels: Array  # i32[B K 1 C], ascending
    H: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class ChannelPruner(PromptAdaptiveKeys):
    """Drops the key channels of each head that score lowest (ThinK, 2407.21018, section 3).

    A channel's score is the mean square of it in a sequence's last queries, over the query heads of the group too,
    times the mean square of it in the keys. Dropped channels count as zero; logits are still divided by the root of H.
    The fields are arguments of `think`, whose `queries` is `num_queries`.
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
        """Chooses the channels that stay, i32[B K 1 C]; ties go to the lower channel."""
        H = x.shape[3]
        is_observed = window_query_mask(observation, self.num_queries)[:, None, None, :, None]
        score = _mean_square(observation.q, is_observed, (2, 3)) * _mean_square(x, (pos >= 0)[..., None], (2,))
        num_kept = H - fraction_of(self.share, H)
        stays = top_k_mask(score, jnp.ones((), bool), jnp.full(score.shape[:1], num_kept, jnp.int32))
        channel = jnp.arange(H, dtype=jnp.int32)[None, None]
        return jnp.sort(jnp.where(stays, channel, H), -1)[:, :, None, :num_kept]

    def encode_with(self, x: Array, pos: Array, params: Array) -> PrunedKeys:
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        return PrunedKeys(memory.pack(_take_channels(x, params)), params, x.shape[3])

    def decode(self, stored: PrunedKeys) -> Array:
        return self._widen(memory.unpack(stored.kept), stored)

    def append(self, stored: PrunedKeys, x: Array, at: Array) -> PrunedKeys:
        return dataclasses.replace(stored, kept=memory.append(stored.kept, _take_channels(x, stored.channels), at))

    def gather(self, stored: PrunedKeys, idx: Array) -> Array:
        return self._widen(memory.gather_tokens(stored.kept, idx), stored)

    def scores(self, q: Array, stored: PrunedKeys) -> Array:
        kept = memory.unpack(stored.kept)
        s = attention.scores(_take_channels(q, stored.channels[:, :, None]), kept)
        return s * (kept.shape[3] / stored.H) ** 0.5  # `attention.scores` divides by the root of C, ThinK by that of H

    def num_quantized(self, n: Array) -> Array:
        return n

    def _widen(self, kept: Array, stored: PrunedKeys) -> Array:
        """Puts zeros into the channels that were dropped: [B K n C] -> [B K n H]."""
        channel = jnp.arange(stored.H, dtype=jnp.int32)[None, None, :, None]
        place = (stored.channels < channel).sum(3, dtype=jnp.int32)[:, :, None]
        stays = (stored.channels == channel).any(3)[:, :, None]
        x = _take_channels(kept, jnp.minimum(place, kept.shape[3] - 1))
        return jnp.where(stays, x, jnp.zeros((), kept.dtype))


def _mean_square(x: Array, real: Array, axes: tuple[int, ...]) -> Array:
    """Averages x * x over these axes, where `real`: f32[B K H]."""
    total = jnp.where(real, jnp.square(x.astype(jnp.float32)), 0.0).sum(axes)
    count = jnp.broadcast_to(real, x.shape).sum(axes, dtype=jnp.float32)
    return total / jnp.maximum(count, 1.0)


def _take_channels(x: Array, channels: Array) -> Array:
    """Takes the channels i32[... C] of x [... H]; axes of size 1 are broadcast."""
    at = jnp.broadcast_to(channels, (*x.shape[:-1], channels.shape[-1]))
    return jnp.take_along_axis(x, at, -1, mode="promise_in_bounds")


@dataclasses.dataclass(frozen=True)
class OlderTokens(PromptAdaptiveTiers):
    """The side store of all tokens that a prompt leaves, except the last `recent`, which stay in the slots whole."""

    k: ChannelPruner
    recent: int = 32
    v: Codec = Plain()

    def __post_init__(self):
        if self.recent < 0:
            raise KvjaxError(f"recent must be 0 or more tokens, got {self.recent}; ThinK uses 32")

    @property
    def num_queries(self) -> int:
        return self.k.num_queries

    def num_main_slots(self, kept: int) -> int:
        return min(kept, self.recent)

    def low_tier_mask(self, layer: MethodLayer, block: KVBlock, observation: Observation | None) -> Array:
        length = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        slot = jnp.arange(block.pos.shape[2], dtype=jnp.int32)[None, None]
        return slot < (length - self.recent)[:, None, None]


@register_method(family="fewer numbers per vector")
def think(share: float = 0.4, recent: int = 32, queries: int = 32) -> Method:
    """Drops the channels of a prompt's keys in which its last queries and its keys are small.

    Over a selection, the keys that it leaves are thinned. Attention in the prompt is exact.

    Formula:
      score_c = mean q_c^2 over the last 32 queries and a group's heads * mean k_c^2 over the prompt; the int(0.4 d)
      lowest channels of a head's keys are dropped, the root of d in the logits stays

    Differs:
      A key/value head drops one set of channels for all of its query heads, as in kvpress; the authors' code repeats
      keys to query heads first. Values keep all channels, as in that code. A composed quantizer stores the last
      `recent` and the decoded tokens; older ones stay unquantized.

    Args:
      share: fraction of each head's channels that are dropped, rounded down (the authors' code: 0.4).
      recent: last tokens of the prompt that keep all channels, as decoded ones do (32).
      queries: last queries of the prompt by which channels are selected (32).

    Reference:
      ThinK, Xu et al. 2024, arXiv 2407.21018, section 3; constants of its authors' code
    """
    return Method(side_store=OlderTokens(ChannelPruner(share, queries), recent))
