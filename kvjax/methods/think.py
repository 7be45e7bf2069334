"""ThinK: drops the key channels of a prompt that its last queries need least."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.codecs.prompt_adaptive import PromptAdaptiveKeys, PromptAdaptiveTiers


@kv.pytree
class PrunedKeys:
    """The keys of all slots, in the channels that each head keeps."""

    kept: kv.memory.Buffer  # [B K S C]
    channels: kv.Array  # i32[B K 1 C], ascending
    H: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class ChannelPruner(PromptAdaptiveKeys):
    """Drops the key channels of each head that score lowest (ThinK, 2407.21018, section 3).

    A channel's score is the mean square of it in a sequence's last queries, over the query heads of the group too,
    times the mean square of it in the keys. Dropped channels count as zero; logits are still divided by the root of H.
    The fields are arguments of `think`, whose `queries` is `num_queries`.
    """

    share: Annotated[float, kv.Within("[0, 1)")] = 0.4
    num_queries: kv.PositiveInt = 32

    is_smooth = True

    __post_init__ = kv.check_fields

    def fit_prompt(self, x: kv.Array, pos: kv.Array, observation: kv.Observation) -> kv.Array:
        """Chooses the channels that stay, i32[B K 1 C]; ties go to the lower channel."""
        H = x.shape[3]
        is_observed = kv.window_query_mask(observation, self.num_queries)[:, None, None, :, None]
        score = _mean_square(observation.q, is_observed, (2, 3)) * _mean_square(x, (pos >= 0)[..., None], (2,))
        num_kept = H - kv.fraction_of(self.share, H)
        stays = kv.top_k_mask(score, jnp.ones((), bool), jnp.full(score.shape[:1], num_kept, jnp.int32))
        channel = jnp.arange(H, dtype=jnp.int32)[None, None]
        return jnp.sort(jnp.where(stays, channel, H), -1)[:, :, None, :num_kept]

    def encode_with(self, x: kv.Array, pos: kv.Array, params: kv.Array) -> PrunedKeys:
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        return PrunedKeys(kv.memory.pack(_take_channels(x, params)), params, x.shape[3])

    def decode(self, stored: PrunedKeys) -> kv.Array:
        return self._widen(kv.memory.unpack(stored.kept), stored)

    def append(self, stored: PrunedKeys, x: kv.Array, at: kv.Array) -> PrunedKeys:
        return dataclasses.replace(stored, kept=kv.memory.append(stored.kept, _take_channels(x, stored.channels), at))

    def gather(self, stored: PrunedKeys, idx: kv.Array) -> kv.Array:
        return self._widen(kv.memory.gather_tokens(stored.kept, idx), stored)

    def scores(self, q: kv.Array, stored: PrunedKeys) -> kv.Array:
        kept = kv.memory.unpack(stored.kept)
        s = kv.attention.scores(_take_channels(q, stored.channels[:, :, None]), kept)
        return s * (kept.shape[3] / stored.H) ** 0.5  # `attention.scores` divides by the root of C, ThinK by that of H

    def _widen(self, kept: kv.Array, stored: PrunedKeys) -> kv.Array:
        """Puts zeros into the channels that were dropped: [B K n C] -> [B K n H]."""
        channel = jnp.arange(stored.H, dtype=jnp.int32)[None, None, :, None]
        place = (stored.channels < channel).sum(3, dtype=jnp.int32)[:, :, None]
        stays = (stored.channels == channel).any(3)[:, :, None]
        x = _take_channels(kept, jnp.minimum(place, kept.shape[3] - 1))
        return jnp.where(stays, x, jnp.zeros((), kept.dtype))


def _mean_square(x: kv.Array, real: kv.Array, axes: tuple[int, ...]) -> kv.Array:
    """Averages x * x over these axes, where `real`: f32[B K H]."""
    total = jnp.where(real, jnp.square(x.astype(jnp.float32)), 0.0).sum(axes)
    count = jnp.broadcast_to(real, x.shape).sum(axes, dtype=jnp.float32)
    return total / jnp.maximum(count, 1.0)


def _take_channels(x: kv.Array, channels: kv.Array) -> kv.Array:
    """Takes the channels i32[... C] of x [... H]; axes of size 1 are broadcast."""
    at = jnp.broadcast_to(channels, (*x.shape[:-1], channels.shape[-1]))
    return jnp.take_along_axis(x, at, -1, mode="promise_in_bounds")


@dataclasses.dataclass(frozen=True)
class OlderTokens(PromptAdaptiveTiers):
    """The side store of all tokens that a prompt leaves, except the last `recent`, which stay in the slots whole."""

    k: ChannelPruner
    recent: kv.NonNegativeInt = 32
    v: kv.Codec = kv.Plain()

    __post_init__ = kv.check_fields

    @property
    def num_queries(self) -> int:
        return self.k.num_queries

    def slots(self, spec: kv.LayerSpec, kept: int, width: int) -> kv.Slots:
        return kv.Slots(kept, min(kept, self.recent), max(kept - self.recent, 0))

    def low_tier_mask(self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None) -> kv.Array:
        length = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        slot = jnp.arange(block.pos.shape[2], dtype=jnp.int32)[None, None]
        return slot < (length - self.recent)[:, None, None]


@kv.register_method(family="fewer numbers per vector")
def think(share: float = 0.4, recent: int = 32, queries: kv.PositiveInt = 32) -> kv.Method:
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
    return kv.Method(side_store=OlderTokens(ChannelPruner(share, queries), recent))
