"""Mixed precision: the less important prompt tokens go into a second tier, with codecs of its own."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax.numpy as jnp

from kvjax.cache.codecs.plain import Plain
from kvjax.cache.components import Scorer, SideStore, Slots
from kvjax.cache.eviction.representatives import fraction_of
from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.cache.readers.query_blocks import QUERY_BLOCK, map_query_blocks
from kvjax.cache.storage import Codec, KVStorage
from kvjax.core.attention import weights
from kvjax.core.attention_mass import Observation
from kvjax.core.memory import bytes_beyond, load
from kvjax.core.mesh import to_numpy
from kvjax.core.top_k import mask_to_slots, top_k_mask
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens, pytree
from kvjax.errors import KvjaxError
from kvjax.utils.abstract import abstract
from kvjax.utils.parameter_types import UnitFloat, Within, check_fields


@pytree
class LowTier:
    """The tokens of the low tier, in the order of their positions."""

    k: Any  # stored by the tier's key codec, S slots
    v: Any  # stored by its value codec
    pos: Array  # i32[B K S], -1 in empty slots
    bias: Array | None = None  # f32[B K S], added to the logits


class PrecisionTiers(SideStore):
    """The base: some prompt tokens go into a low tier with its own codecs, and all others stay in the main slots.

    A subclass is a frozen dataclass with the codecs `k` and `v`, and defines `slots` and `low_tier_mask`. The low tier
    is on the device; it is read in full, whatever the method's reader reads of the main slots.
    """

    k: Codec
    v: Codec

    @abstract
    def low_tier_mask(self, spec: LayerSpec, block: KVBlock, observation: Observation | None) -> Array:
        """bool[B 1|K S]: the tokens of a clean block that go into the low tier, equally many in each head."""
        ...

    def encode_low_tier(self, low: KVBlock, block: KVBlock, observation: Observation | None) -> LowTier:
        """Stores the tokens `low` of a prompt's block; a subclass may fit its codecs to the whole block."""
        return LowTier(self.k.encode(low.k, low.pos), self.v.encode(low.v, low.pos), low.pos, low.bias)

    def split(
        self, storage: KVStorage, block: KVBlock, observation: Observation | None, slots: Slots
    ) -> tuple[KVBlock, LowTier]:
        # A tier's scorer and a codec that is fitted to the prompt read all slots, also what padding left there.
        block = block.clean()
        is_low = self.low_tier_mask(storage.spec, block, observation)
        main = gather_tokens(block, mask_to_slots((block.pos >= 0) & ~is_low, slots.main))
        # The low tier has at least one slot, since attention over no slots is undefined.
        low = gather_tokens(block, mask_to_slots(is_low, max(slots.side, 1)))
        return main, self.encode_low_tier(low, block, observation)

    def read(self, storage: KVStorage, state: LayerState, q: Array, q_pos: Array) -> Partial:
        store = state.side_store
        keys, values = load((store.k, store.v))

        def attend(q: Array, q_pos: Array) -> Partial:
            s = self.k.scores(q, keys)
            p, m, l = weights(storage.spec.rule.logits(s, store.pos, q_pos, store.bias))
            return Partial(self.v.mix(p, values), m, l)

        return map_query_blocks(attend, q, q_pos, QUERY_BLOCK)

    def positions(self, store: LowTier) -> Array:
        return store.pos

    def empty_bytes(self, store: LowTier, slots: Slots | None = None, prompt: int | None = None) -> dict[str, int]:
        B, _, S = store.pos.shape
        if slots is not None:
            return bytes_beyond(store, S, [min(slots.side, S)] * B)
        is_token = to_numpy(store.pos) >= 0
        return bytes_beyond(store, S, is_token.sum(2).max(1).tolist())

    def visible_block(self, storage: KVStorage, store: LowTier) -> KVBlock:
        return KVBlock(self.k.decode(store.k), self.v.decode(store.v), store.pos)


@dataclasses.dataclass(frozen=True)
class ScoredTiers(PrecisionTiers):
    """Puts the prompt tokens with the lowest scores of each head into the low tier; ties put the earlier token there.

    Args:
      scorer: how important each token is.
      share: fraction of each sequence's prompt tokens in the low tier, rounded down.
      k: codec of the low tier's keys.
      v: codec of its values.
      recent: fraction of the tokens in the main slots, rounded down, that is reserved for the newest tokens whatever
        they score.
    """

    scorer: Scorer
    share: Annotated[float, Within("[0, 1)")]
    k: Codec = Plain()
    v: Codec = Plain()
    recent: UnitFloat = 0.0

    def __post_init__(self):
        check_fields(self)
        if self.scorer.needs_hidden or self.scorer.needs_output or self.scorer.replay is not None:
            raise KvjaxError(
                f"a tier is scored by keys, values and queries alone, and {type(self.scorer).__name__} needs more; use "
                "it in the component `select`"
            )

    @property
    def num_queries(self) -> int | None:
        return self.scorer.num_queries

    def slots(self, spec: LayerSpec, kept: int, width: int) -> Slots:
        num_low = fraction_of(self.share, kept)
        return Slots(kept, kept - num_low, num_low)

    def low_tier_mask(self, spec: LayerSpec, block: KVBlock, observation: Observation | None) -> Array:
        scores = self.scorer.scores(block, observation, spec).per_kv_head
        length = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        # Of the sequence's own length and not the padded one, so that a batch stores what each text alone would.
        num_low = fraction_of(self.share, length)
        first_recent = length - fraction_of(self.recent, length - num_low)
        slot = jnp.arange(block.pos.shape[2], dtype=jnp.int32)[None, None]
        return top_k_mask(-scores, slot < first_recent[:, None, None], num_low)
