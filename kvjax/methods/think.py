"""ThinK: a prompt's keys without the channels that its last queries need least."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.codecs.base import Codec, Plain
from kvjax.cache.codecs.prompt_adaptive import TiersByPrompt
from kvjax.cache.codecs.thin import ChannelPruner
from kvjax.cache.method import Method
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


@dataclasses.dataclass(frozen=True)
class OlderTokens(TiersByPrompt):
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

    def chosen(self, layer: MethodLayer, block: KVBlock, observation: Observation | None) -> Array:
        length = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        slot = jnp.arange(block.pos.shape[2], dtype=jnp.int32)[None, None]
        return slot < (length - self.recent)[:, None, None]


def _bytes(x: Sizes) -> Bytes:
    """The last 2 prompt tokens and all that is decoded at full width; before them 20 of 32 channels of keys."""
    older, slots = x.prompt - 2, x.left(2)
    keys = x.B * x.K * 20 * (older * x.itemsize + 4)  # and which channels these are
    return Bytes(2 * x.rows(slots) + keys + x.rows(older) + x.positions(slots + older) + x.per_row())


@recipe(
    "ThinK, Xu et al. 2024, arXiv 2407.21018, section 3; constants of its authors' code",
    Trial("think:recent=2,queries=2", "think:share=0,recent=2", _bytes),
    formula="score_c = mean q_c^2 over the last 32 queries and a group's heads * mean k_c^2 over the prompt; the "
    "int(0.4 d) lowest channels of a head's keys are dropped, the root of d in the logits stays",
    differs="A key/value head drops one set of channels for all of its query heads, as in kvpress; the authors' code "
    "repeats keys to query heads first. Values keep all channels, as in that code; a quantiser beside it holds the "
    "last `recent` tokens and what is decoded, and the older ones stay as they are.",
    example="think",
    family="fewer numbers per vector",
)
def think(share: float = 0.4, recent: int = 32, queries: int = 32) -> Method:
    """The keys of a prompt lose the channels in which its last queries and its keys are small.

    share: of each head's channels, those that are dropped (the authors' code: 0.4). recent: so many last tokens of the
    prompt keep all channels, and so does what is decoded (32). queries: the last prompt queries by which channels are
    chosen (32). Over a selection, the keys that it leaves are thinned. Attention in the prompt is exact.
    """
    return Method(side_store=OlderTokens(ChannelPruner(share, queries), recent))
