"""A second tier of precision: prompt tokens that matter little are held by other codecs than the rest."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from kvjax.cache.accounting import bytes_beyond
from kvjax.cache.codecs.base import Codec, Plain
from kvjax.cache.eviction.representatives import fraction_of
from kvjax.cache.eviction.scorers import Scorer
from kvjax.cache.protocol import LayerState
from kvjax.cache.readers.base import map_query_blocks
from kvjax.cache.side_store.base import SideStore
from kvjax.core.attention import MASKED_LOGIT, visible, weights
from kvjax.core.attention_mass import Observation
from kvjax.core.top_k import mask_to_slots, top_k_mask
from kvjax.core.types import Array, KVBlock, Partial, gather_tokens, pytree
from kvjax.errors import KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer


@pytree
class Low:
    """The tokens of the low tier, in the order of their positions."""

    k: Any  # stored by the tier's key codec, S slots
    v: Any  # stored by its value codec
    pos: Array  # i32[B K S], -1 empty
    bias: Array | None = None  # f32[B K S], added to the logits


class Tiers(SideStore):
    """The base of tiers: some of the prompt's tokens are held by codecs of their own, all others stay in the slots.

    A tier is a frozen dataclass with the codecs `k` and `v`; `num_main_slots` says how many tokens stay at most, and
    `chosen` which of them do not. Over a selection, the tokens that it leaves are divided. The low tier stays on the
    device, and is read in full beside whatever the method's reader reads of the slots.
    """

    k: Codec
    v: Codec

    def room(self, kept: int) -> int:
        """Of so many tokens that a prompt leaves, at most how many go into the low tier."""
        return kept - self.num_main_slots(kept)

    def chosen(self, layer: MethodLayer, block: KVBlock, observation: Observation | None) -> Array:
        """bool[B 1|K S]: the tokens of a clean block that go into the low tier; in each head of a row equally many."""
        raise NotImplementedError

    def held(self, there: KVBlock, block: KVBlock, observation: Observation | None) -> Low:
        """The store of the tokens `there` of a block."""
        return Low(self.k.encode(there.k, there.pos), self.v.encode(there.v, there.pos), there.pos, there.bias)

    def split(
        self, layer: MethodLayer, block: KVBlock, observation: Observation | None, slots: int
    ) -> tuple[KVBlock, Low]:
        most = self._most(layer, block.pos.shape[2], slots)
        if layer.method.select is not None:
            block = layer.selected(block, observation, most)
        block = block.clean()
        low = self.chosen(layer, block, observation)
        here = gather_tokens(block, mask_to_slots((block.pos >= 0) & ~low, self.num_main_slots(most)))
        there = gather_tokens(block, mask_to_slots(low, max(self.room(most), 1)))
        return here, self.held(there, block, observation)

    def _most(self, layer: MethodLayer, width: int, slots: int) -> int:
        """Most tokens that a prompt of up to `width` leaves, if those that stay in the body have so many slots."""
        method = layer.method
        if method.select is not None and method.layer_budgets is None:
            width = method.select.max_kept_up_to(width)
        return next(n for n in range(width, 0, -1) if self.num_main_slots(n) <= slots)

    def read(self, layer: MethodLayer, state: LayerState, q: Array, q_pos: Array) -> Partial:
        store = state.side_store
        keys, values = self.k.load(store.k), self.v.load(store.v)

        def attend(q: Array, q_pos: Array) -> Partial:
            s = self.k.scores(q, keys)
            if store.bias is not None:
                s = s + store.bias[:, :, None, None]
            p, m, l = weights(jnp.where(visible(store.pos, q_pos, layer.spec.window), s, MASKED_LOGIT))
            return Partial(self.v.mix(p, values), m, l)

        return map_query_blocks(attend, q, q_pos, 512)

    def positions(self, store: Low) -> Array:
        return store.pos

    def empty_bytes(self, store: Low) -> dict[str, int]:
        used = (np.asarray(store.pos) >= 0).sum(2).max(1).tolist()
        return bytes_beyond(store, store.pos.shape[2], used)

    def planned_empty_bytes(self, store: Low, kept: int, prompt: int) -> dict[str, int]:
        slots = store.pos.shape[2]
        return bytes_beyond(store, slots, [min(self.room(kept), slots)] * store.pos.shape[0])

    def visible_block(self, layer: MethodLayer, store: Low) -> KVBlock:
        return KVBlock(self.k.decode(store.k), self.v.decode(store.v), store.pos)


@dataclasses.dataclass(frozen=True)
class Tier(Tiers):
    """The `share` of each row's prompt tokens, rounded down, that score lowest in their head, in codecs of their own.

    recent: of the tokens that stay, the share, rounded down, that are the newest, whatever they score.
    """

    scorer: Scorer
    share: float
    k: Codec = Plain()
    v: Codec = Plain()
    recent: float = 0.0

    def __post_init__(self):
        if not 0 <= self.share < 1:
            raise KvjaxError(f"share of the low tier must lie in [0, 1), got {self.share}; ZipCache uses 0.4")
        if not 0 <= self.recent <= 1:
            raise KvjaxError(f"recent must lie in [0, 1], got {self.recent}; H2O's recent half is 0.5")

    @property
    def num_queries(self) -> int | None:
        """As many as the scorer wants to see."""
        return self.scorer.num_queries

    def num_main_slots(self, kept: int) -> int:
        return kept - fraction_of(self.share, kept)

    def chosen(self, layer: MethodLayer, block: KVBlock, observation: Observation | None) -> Array:
        """Of equal scores the earlier ones go into the low tier."""
        scores = self.scorer.scores(block, observation, layer.spec).per_kv_head
        length = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        low = fraction_of(self.share, length)
        old = length - fraction_of(self.recent, length - low)
        slot = jnp.arange(block.pos.shape[2], dtype=jnp.int32)[None, None]
        return top_k_mask(-scores, slot < old[:, None, None], low)
