"""ThinK: a prompt's keys without the channels that its last queries need least."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.codecs.base import Codec, Plain
from kvjax.cache.codecs.prompt_adaptive import PromptAdaptiveTiers
from kvjax.cache.codecs.thin import ChannelPruner
from kvjax.cache.method import Method
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.registry import register_method


@dataclasses.dataclass(frozen=True)
class OlderTokens(PromptAdaptiveTiers):
    """All tokens that a prompt leaves but the last `recent`, which stay in the slots at full width."""

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
      share: fraction of each head's channels that are dropped (the authors' code: 0.4).
      recent: last tokens of the prompt that keep all channels, as decoded ones do (32).
      queries: last queries of the prompt by which channels are selected (32).

    Reference:
      ThinK, Xu et al. 2024, arXiv 2407.21018, section 3; constants of its authors' code
    """
    return Method(side_store=OlderTokens(ChannelPruner(share, queries), recent))
