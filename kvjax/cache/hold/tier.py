"""A second tier of precision: prompt tokens that matter little are held by other codecs than the rest."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.cache.apart import Apart
from kvjax.cache.contract import LayerState
from kvjax.cache.hold.codecs import Codec, Plain
from kvjax.cache.read.reader import by_query_blocks
from kvjax.cache.select.represent import part_of
from kvjax.cache.select.scorers import Scorer
from kvjax.cache.select.units import gather, top
from kvjax.core.attention import NEG, visible, weights
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block, IncompatibleMethod, KvjaxError, Partial, pytree


@pytree
class Low:
    """The tokens of the low tier, in the order of their positions."""

    k: Any  # stored by the tier's key codec, S slots
    v: Any  # stored by its value codec
    pos: Array  # i32[B K S], -1 empty
    bias: Array | None = None  # f32[B K S], added to the logits


@dataclasses.dataclass(frozen=True)
class Tier(Apart):
    """The `share` of each row's prompt tokens, rounded down, that score lowest in their head, in codecs of their own.

    All other tokens, and those that follow, stay in the slots, with the codecs of the method. Each head has as many
    tokens in the low tier as the others. Over a selection, the tokens that it leaves are divided. The low tier stays on
    the device, and is read in full beside whatever the method's reader reads of the slots.
    """

    scorer: Scorer
    share: float
    k: Codec = Plain()
    v: Codec = Plain()

    def __post_init__(self):
        if not 0 <= self.share < 1:
            raise KvjaxError(f"share of the low tier must lie in [0, 1), got {self.share}; ZipCache uses 0.4")

    @property
    def queries(self) -> int | None:
        """As many as the scorer wants to see."""
        return self.scorer.queries

    def body(self, kept: int) -> int:
        return kept - part_of(self.share, kept)

    def split(self, layer: Any, block: Block, seen: Obs | None, slots: int) -> tuple[Block, Low]:
        most = self._most(layer, block.pos.shape[2], slots)
        if layer.method.select is not None:
            block = layer.selected(block, seen, most)
        block = block.clean()
        low = self._lowest(layer, block, seen)
        here = gather(block, _places((block.pos >= 0) & ~low, self.body(most)))
        there = gather(block, _places(low, max(part_of(self.share, most), 1)))
        store = Low(self.k.encode(there.k, there.pos), self.v.encode(there.v, there.pos), there.pos, there.bias)
        return here, store

    def _most(self, layer: Any, width: int, slots: int) -> int:
        """Most tokens that a prompt of up to `width` leaves, if those that stay in the body have so many slots."""
        method = layer.method
        if method.select is not None and method.shares is None:
            width = method.select.most_of(width, layer.spec)
        return next(n for n in range(width, 0, -1) if self.body(n) <= slots)

    def _lowest(self, layer: Any, block: Block, seen: Obs | None) -> Array:
        """bool[B K S]: the tokens that go into the low tier; of equal ones the earlier."""
        scores = self.scorer.scores(block, seen, layer.spec).kv
        length = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        return top(-scores, block.pos >= 0, part_of(self.share, length))

    def read(self, layer: Any, state: LayerState, q: Array, q_pos: Array) -> Partial:
        store = state.apart
        keys, values = self.k.load(store.k), self.v.load(store.v)

        def attend(q: Array, q_pos: Array) -> Partial:
            s = self.k.scores(q, keys)
            if store.bias is not None:
                s = s + store.bias[:, :, None, None]
            p, m, l = weights(jnp.where(visible(store.pos, q_pos, layer.spec.window), s, NEG))
            return Partial(self.v.mix(p, values), m, l)

        return by_query_blocks(attend, q, q_pos, 512)

    def positions(self, store: Low) -> Array:
        return store.pos

    def check(self, layer: Any) -> None:
        method = layer.method
        if method.decode is not None:
            raise IncompatibleMethod(
                "slot `apart` holds the less salient prompt tokens for good, and slot `decode`, "
                f"{type(method.decode).__name__}, would have to evict them too; leave one of them out"
            )
        if layer.needs.chunk:
            raise IncompatibleMethod(
                "slot `apart` divides a prompt that has been seen whole, and slot `read`, "
                f"{type(method.read).__name__}, takes it in pieces of {layer.needs.chunk} tokens; leave one of them out"
            )


def _places(mask: Array, count: int) -> Array:
    """bool[B K S] -> the slots where it holds, i32[B K count], ascending, -1 in unused places."""
    S = mask.shape[2]
    slot = jnp.arange(S, dtype=jnp.int32)[None, None]
    found = jnp.sort(jnp.where(mask, slot, S), 2)[:, :, :count]
    return jnp.where(found < S, found, -1)
