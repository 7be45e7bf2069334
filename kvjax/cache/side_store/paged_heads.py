"""Heads of unequal length: the prompt's tokens in pages, each of them owned by one head.

Pages of `page` slots stand on K shelves of equally many pages. Which shelf a page stands on says nothing of its owner:
so shelves can be divided among devices, whatever the heads' lengths, and codecs hold a shelf as they hold a head. A
page is read by the queries of its owner, and the partials of an owner's pages are merged. A layer of K heads that keep
n tokens in the mean has room for floor(K (n + page - 1) / page) pages: each head's last one may be all but empty.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.accounting import bytes_beyond
from kvjax.cache.codecs.base import PagedArrays
from kvjax.cache.eviction.budget_allocation import SHARED_ROUNDING, HeadBudgets
from kvjax.cache.eviction.ranking import BestOfLayer, MeasuredHeadTokens
from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.cache.readers.base import map_query_blocks
from kvjax.cache.readers.full import Full
from kvjax.cache.side_store.base import SideStore
from kvjax.core.attention import MASKED_LOGIT, attend_dense, mix, visible
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.types import Array, KVBlock, Partial, pytree
from kvjax.errors import IncompatibleMethod, KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer
    from kvjax.cache.eviction.budgets import Budget
    from kvjax.cache.method import Method

FEW_QUERIES = 16
"""Queries of a head up to which short pages are read with their logits side by side."""

LONG_PAGE = 64
"""Slots of a page whose logits make a row that is long enough."""


@pytree
class PagePools:
    """The pages of a layer, R = pages of a shelf * page."""

    k: Any  # [B K R H], as the key codec stores it
    v: Any  # [B K R H], as the value codec stores it
    pos: Array  # i32[B K R], original positions, -1 empty
    owner: Array  # i32[B K R/page], the head of each page, -1 for none
    bias: Array | None  # f32[B K R], added to the logits


@dataclasses.dataclass(frozen=True)
class Pages(SideStore):
    """Each head keeps as many of the prompt's tokens as `share` gives it, in pages of `page` slots.

    The slots hold what is decoded, of all heads alike. Bytes are those of whole pages: K times the budget, and less
    than two pages a head, where heads padded to the longest take K times the longest. A budget that grows with the
    prompt counts by the width that prompts are padded to.
    """

    share: HeadBudgets
    page: int = 16
    slots_per_head: int | None = None  # in the mean, where they were counted after all layers had seen the prompt
    by_head = True

    def __post_init__(self):
        if self.page < 1:
            raise KvjaxError(f"a page has at least 1 slot, got page={self.page}; use 16")

    def num_main_slots(self, kept: int) -> int:
        """None of the prompt's tokens stay in the slots."""
        return 0

    def split(
        self, layer: MethodLayer, block: KVBlock, observation: Observation | None, slots: int
    ) -> tuple[KVBlock, PagePools]:
        """A prompt's block -> (a block without slots, all that the heads keep of it, in pages)."""
        select = layer.method.select
        assert select is not None
        most, share = select.max_kept_up_to(block.pos.shape[2]), self.share
        if observation is not None and observation.num_kept is not None:
            share = MeasuredHeadTokens(observation.num_kept, select.granularity.size)
        kept = layer.selected(block, observation, most, share)
        nothing = KVBlock(block.k[:, :, :0], block.v[:, :, :0], block.pos[:, :1, :0])
        return nothing, self._shelved(layer, kept, self._pages(layer, most, block.pos.shape[2]))

    @property
    def after_prompt(self) -> Pages:
        """Pages that any rule may have divided: heads of unequal length are read alike, whatever made them so."""
        return dataclasses.replace(self, share=BestOfLayer(), slots_per_head=None)

    def bind_budget(self, method: Method, budget: Budget, spec: LayerSpec) -> Method:
        """The method with the selection and the rule that the rule makes of them in this layer."""
        select, share = self.share.bind_budget(method, budget, spec)
        return dataclasses.replace(method, select=select, side_store=dataclasses.replace(self, share=share))

    def _known_pages(self, longest: int) -> np.ndarray | None:
        """i64[longest + 1]: pages that all heads own together of prompts of 0..longest tokens, where that is known."""
        tokens = self.share.tokens_by_length(longest)
        return None if tokens is None else (-(-tokens // self.page)).sum(1)

    def _pages(self, layer: MethodLayer, most: int, width: int) -> int:
        """Pages of a shelf for prompts of up to `width` tokens, of which each head keeps `most` in the mean."""
        K = layer.spec.num_kv_heads
        if (known := self._known_pages(width)) is not None:
            return int(-(-known.max() // K))
        pages = -(-(K * (most + self.page - 1) // self.page) // K)
        if layer.method.layer_budgets is None:
            return pages
        if self.slots_per_head is not None:
            return -(-self.slots_per_head // self.page)
        # A plan is made before any layer has seen the prompt, as if each kept a budget of its own. Each then gets one
        # page more, as whole pages may add to any of them, and those that the rounding of its slots may add, so that
        # the plan of all layers together is never below what they hold.
        rounding = -(-SHARED_ROUNDING // self.page)
        return pages + 1 + rounding

    def num_kept_slots(self, tokens: np.ndarray) -> int:
        """Slots of each head in the mean for the tokens i32[B K] that heads keep, in whole pages."""
        pages = (-(-tokens // self.page)).sum(1).max()
        return max(1, int(-(-pages // tokens.shape[1]))) * self.page  # a store without a page could not be read

    def with_kept_slots(self, slots: int) -> Pages:
        return dataclasses.replace(self, slots_per_head=slots)

    def _shelved(self, layer: MethodLayer, kept: KVBlock, pages: int) -> PagePools:
        """Heads with their tokens at the front -> the shelves of this device, so many pages each.

        Each device sees for once what the heads of all devices keep.
        """
        here = kept.k.shape[1]
        number = (over_heads.first_head(here) + jnp.arange(here, dtype=jnp.int32)[:, None]) * pages
        number = number + jnp.arange(pages, dtype=jnp.int32)[None]  # i32[K pages], over all shelves
        length = over_heads.gather((kept.pos >= 0).sum(-1, dtype=jnp.int32))
        owner, slot = _places(length, number, self.page)
        full = slot >= 0
        at = jnp.where(full, jnp.repeat(owner, self.page, -1) * kept.pos.shape[2] + slot, 0)

        def shelved(x: Array) -> Array:
            every = over_heads.gather(x)
            rows = every.reshape(every.shape[0], -1, *every.shape[3:])
            index = at.reshape(*at.shape[:1], -1, *(1,) * (rows.ndim - 2))
            return jnp.take_along_axis(rows, index, 1).reshape(*at.shape, *rows.shape[2:])

        pos, layer = jnp.where(full, shelved(kept.pos), -1), self._in_pages(layer)
        k, v = layer.k.encode(shelved(layer.as_held(kept)), pos), layer.v.encode(shelved(kept.v), pos)
        return PagePools(k, v, pos, owner, None if kept.bias is None else shelved(kept.bias))

    def read(self, layer: MethodLayer, state: LayerState, q: Array, q_pos: Array) -> Partial:
        """Each page by the queries of its owner, then the pages of each head as one."""
        store: PagePools = state.side_store
        layer, (B, here) = self._in_pages(layer), q.shape[:2]
        owner = store.owner.reshape(B, -1)

        def paged(x: Array) -> Array:
            return x.reshape(B, owner.shape[1], self.page, *x.shape[3:])

        bias = None if store.bias is None else paged(store.bias)
        keys, values = layer.keys(store.k, store.pos), layer.v.decode(store.v)
        block = KVBlock(paged(keys), paged(values), paged(store.pos), bias)

        def attend(q: Array, q_pos: Array) -> Partial:
            every = over_heads.gather(q)
            asking = jnp.take_along_axis(every, jnp.maximum(owner, 0)[:, :, None, None, None], 1)
            # Of few queries and short pages the softmax takes longer than the products, unless its rows are long ones.
            side_by_side = q.shape[2] * q.shape[3] <= FEW_QUERIES and self.page < LONG_PAGE
            parts = _attend_side_by_side if side_by_side else attend_dense
            part = parts(asking, block, q_pos, layer.spec.window)
            merged = _by_owner(part, owner, every.shape[1])
            return Partial(*(lax.dynamic_slice_in_dim(x, over_heads.first_head(here), here, 1) for x in merged))

        return map_query_blocks(attend, q, q_pos, 64)

    def _in_pages(self, layer: MethodLayer) -> MethodLayer:
        """The layer, with what its codecs hold pages with."""
        k, v = (codec.in_pages(self.page) for codec in (layer.k, layer.v))
        return dataclasses.replace(layer, method=dataclasses.replace(layer.method, k=k, v=v))

    def empty_bytes(self, store: PagePools) -> dict[str, int]:
        """Those of pages without an owner; a page of which one slot is filled is held whole."""
        owned = (np.asarray(store.owner) >= 0).sum((1, 2))
        return self._bytes_beyond(store, (owned / store.pos.shape[1]).tolist())

    def planned_empty_bytes(self, store: PagePools, kept: int, prompt: int) -> dict[str, int]:
        """Bytes of the pages that no head can need, where heads keep so many tokens in the mean.

        A head needs the most pages for its tokens when the last one holds a single token.
        """
        B, K, R = store.pos.shape
        if (known := self._known_pages(prompt)) is not None:
            return self._bytes_beyond(store, [int(known[prompt]) / K] * B)
        return self._bytes_beyond(store, [min(kept + self.page - 1, R) / self.page] * B)

    def _bytes_beyond(self, store: PagePools, pages: list[float]) -> dict[str, int]:
        """Bytes of the slots beyond so many pages of each shelf, in the mean: what codecs have of a slot, or a page."""
        R = store.pos.shape[2]
        total = bytes_beyond(store, R, [count * self.page for count in pages])
        # A codec around another one holds its pages within what it stores.
        held = jax.tree.leaves((store.k, store.v), is_leaf=lambda x: isinstance(x, PagedArrays))
        codes = [x for x in held if isinstance(x, PagedArrays) and self.page > 1]
        of_pages = bytes_beyond(codes, R // self.page, pages)
        return {kind: size + of_pages[kind] for kind, size in total.items()}

    def positions(self, store: PagePools) -> Array:
        """i32[B K S], S the slots of all shelves."""
        B, K, R = store.pos.shape
        owner = jnp.repeat(store.owner, self.page, -1).reshape(B, 1, K * R)
        mine = owner == jnp.arange(K, dtype=jnp.int32)[None, :, None]
        return jnp.where(mine, store.pos.reshape(B, 1, K * R), -1)

    def visible_block(self, layer: MethodLayer, store: PagePools) -> KVBlock:
        """All shelves in a row, for each head."""
        layer = self._in_pages(layer)
        keys, values = layer.keys(store.k, store.pos), layer.v.decode(store.v)
        k, v = (x.reshape(x.shape[0], 1, -1, x.shape[3]) for x in (keys, values))
        return KVBlock(k, v, self.positions(store))

    def check(self, layer: MethodLayer) -> None:
        """Raises IncompatibleMethod for other slots of the method that this one cannot work with."""
        m = layer.method
        if m.select is None:
            raise IncompatibleMethod(
                f"{self.share} (slot `side_store`) divides what a selection keeps among the heads and has none to "
                "stand on; compose it with one, as in 'snapkv:budget=256 + adakv'"
            )
        mixed = "its groups of tokens would mix those of several heads"
        own = "it holds each head in a way of its own, and a page is not held where its head is"
        reasons = (
            ("select", m.select.scope == "layer", "with per='layer' all heads keep the same tokens"),
            (
                "layer_budgets",
                m.layer_budgets is not None and not m.layer_budgets.by_head,
                "it gives all heads of a layer equally many",
            ),
            ("decode", m.decode is not None, "a policy takes tokens out of the slots, and the prompt's lie in pages"),
            ("read", not isinstance(m.read, Full), "it chooses among the slots, and the prompt's tokens lie in pages"),
            ("k", m.k.in_pages(self.page) is None, mixed),
            ("v", m.v.in_pages(self.page) is None, mixed),
            ("k", m.k.by_head, own),
            ("v", m.v.by_head, own),
        )
        for name, cannot, reason in reasons:
            if cannot:
                raise IncompatibleMethod(
                    f"slot `side_store` gives heads unequal lengths and cannot work with slot `{name}`, "
                    f"{type(getattr(m, name)).__name__}: {reason}; leave one of them out, or let every head keep "
                    "equally many tokens (level=head, where it has a `level`)"
                )


def _places(length: Array, number: Array, page: int) -> tuple[Array, Array]:
    """Tokens of each head i32[B K], page numbers i32[K P] -> (their owners i32[B K P], each slot's token i32[B K R]).

    Heads take pages in order, each as many as it needs; -1 for a page or a slot that is not needed.
    """
    need = -(-length // page)
    end = jnp.cumsum(need, 1, dtype=jnp.int32)
    owner = (number[None, :, :, None] >= end[:, None, None]).sum(-1, dtype=jnp.int32)
    used = owner < length.shape[1]
    head = jnp.where(used, owner, 0).reshape(length.shape[0], -1)
    first, held = (jnp.take_along_axis(x, head, 1).reshape(owner.shape) for x in (end - need, length))
    slot = (number[None] - first)[..., None] * page + jnp.arange(page, dtype=jnp.int32)[None, None, None]
    slot = jnp.where(used[..., None] & (slot < held[..., None]), slot, -1)
    return jnp.where(used, owner, -1), slot.reshape(*owner.shape[:2], -1)


def _attend_side_by_side(q: Array, block: KVBlock, q_pos: Array, window: int | None) -> Partial:
    """`attend_dense` of pages as heads, q [B P G T H], with the logits of all pages in one row for each query."""
    B, P, G, T, H = q.shape
    dims = (((3,), (3,)), ((0, 1), (0, 1)))  # keys first: as the second operand XLA:CPU would transpose them
    s = lax.dot_general(block.k, q.reshape(B, P, G * T, H), dims, preferred_element_type=jnp.float32) * H**-0.5
    s = jnp.moveaxis(s.reshape(B, -1, G, T), 1, 3)[:, None]  # [B 1 G T P*page]
    if block.bias is not None:
        s = s + block.bias.reshape(B, 1, 1, 1, -1)
    s = jnp.where(visible(block.pos.reshape(B, 1, -1), q_pos, window), s, MASKED_LOGIT)[:, 0]
    m = lax.stop_gradient(s.reshape(B, G, T, P, -1).max(-1))  # as in `weights`
    p = jnp.where(s > MASKED_LOGIT / 2, jnp.exp(s - jnp.repeat(m, s.shape[3] // P, -1)), 0.0)
    p, m = jnp.moveaxis(p.reshape(B, G, T, P, -1), 3, 1), jnp.moveaxis(m, 3, 1)
    return Partial(mix(p, block.v), m, p.sum(-1))


def _by_owner(part: Partial, owner: Array, heads: int) -> Partial:
    """Partials of this device's pages, [B P G T ..] -> those of all heads over all pages, [B K G T ..]; log-sum-exp."""
    mine = owner[:, :, None] == jnp.arange(heads, dtype=jnp.int32)[None, None]  # [B P K]
    m = over_heads.max(jnp.where(mine[..., None, None], part.m[:, :, None], MASKED_LOGIT))[:, 0]
    top = jnp.take_along_axis(m, jnp.maximum(owner, 0)[:, :, None, None], 1)
    weight = jnp.exp(part.m - top)

    def total(x: Array) -> Array:
        here = jnp.einsum("bpk,bp...->bk...", mine.astype(jnp.float32), x, precision=lax.Precision.HIGHEST)
        return over_heads.sum(here[:, None])[:, 0]

    return Partial(total(weight[..., None] * part.o), m, total(weight * part.l))
