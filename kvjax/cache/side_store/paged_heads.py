"""Paged storage for heads of unequal length: every page of prompt tokens belongs to one key/value head.

The pages of a layer lie in K pools of equally many pages. A page may belong to any head; `owner` says which. So pools
divide equally among devices, whatever the heads' lengths, and a codec stores a pool as it stores a head. The queries of
its owner read a page, and the partials of an owner's pages are merged. A layer whose K heads keep n tokens on average
has floor(K (n + page - 1) / page) pages, since the last page of each head may hold a single token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.components import Components, HeadBudgets, SideStore, Slots
from kvjax.cache.eviction.budget_allocation import most_shared_slots
from kvjax.cache.eviction.ranking import BestOfLayer, BestOfModel
from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.cache.readers.full import Full
from kvjax.cache.readers.query_blocks import map_query_blocks
from kvjax.cache.storage import KVStorage, PagedArrays
from kvjax.core.attention import MASKED_LOGIT, Rule, attend_dense, mix, visible
from kvjax.core.attention_mass import Observation
from kvjax.core.memory import bytes_beyond
from kvjax.core.mesh import over_heads, to_numpy
from kvjax.core.types import Array, KVBlock, Partial, pytree
from kvjax.errors import IncompatibleMethod
from kvjax.utils.parameter_types import PositiveInt, check_fields

# With few queries and short pages a softmax over rows of one page takes longer than the products, so the logits of all
# pages are then laid side by side in one long row for each query.
FEW_QUERIES = 16
LONG_PAGE_SLOTS = 64


@pytree
class PagePools:
    """The pages of a layer; a pool has R slots, its pages times `page`."""

    k: Any  # [B K R H], as the key codec stores it
    v: Any  # [B K R H], as the value codec stores it
    pos: Array  # i32[B K R], original positions, -1 in empty slots
    owner: Array  # i32[B K R/page], the head of each page, -1 for none
    bias: Array | None  # f32[B K R], added to the logits


@dataclasses.dataclass(frozen=True)
class PagedHeads(SideStore):
    """Gives each head its own number of prompt tokens, in pages.

    The main slots hold decoded tokens, equally many of every head. Whole pages cost less than two pages per head above
    the budget, where heads padded to the longest would cost K times the longest. A budget that grows with the prompt
    counts by the width that prompts are padded to.

    Args:
      head_budgets: how many tokens each head keeps.
      page: slots of a page.
    """

    head_budgets: HeadBudgets
    page: PositiveInt = 16

    __post_init__ = check_fields

    def slots(self, spec: LayerSpec, kept: int, width: int) -> Slots:
        K = spec.num_kv_heads
        if (known := self._pages_by_length(width)) is not None:
            return Slots(kept, 0, self.page * int(-(-known.max() // K)))
        pages = -(-(K * (kept + self.page - 1) // self.page) // K)
        if isinstance(self.head_budgets, BestOfModel):
            # Memory is planned before any layer has seen the prompt, as if each kept its own budget. Each layer gets
            # one page more, as whole pages may add to any of them, and the pages that rounding its slots may add, so
            # that the plan of all layers together is never below what they will store.
            pages = -(-most_shared_slots((pages + 1) * self.page, width) // self.page)
        return Slots(kept, 0, self.page * pages)

    def count_slots(self, tokens: np.ndarray) -> int:
        pages = (-(-tokens // self.page)).sum(1).max()
        return max(1, int(-(-pages // tokens.shape[1]))) * self.page  # a store without a page could not be read

    def split(
        self, storage: KVStorage, block: KVBlock, observation: Observation | None, slots: Slots
    ) -> tuple[KVBlock, PagePools]:
        nothing = KVBlock(block.k[:, :, :0], block.v[:, :, :0], block.pos[:, :1, :0])
        return nothing, self.encode_placed(storage, self.place(storage, block, slots.side), slots.side)

    @property
    def after_prompt(self) -> PagedHeads:
        # Pages are read alike whatever rule divided the heads, so all rules share the decode program of one.
        return dataclasses.replace(self, head_budgets=BestOfLayer())

    def _pages_by_length(self, longest: int) -> np.ndarray | None:
        """i64[longest + 1]: pages of all heads for prompts of each length; None where the prompt decides."""
        tokens = self.head_budgets.num_kept_by_length(longest)
        return None if tokens is None else (-(-tokens // self.page)).sum(1)

    def place(self, storage: KVStorage, block: KVBlock, num_slots: int) -> PagePools:
        """Distributes the heads' tokens, left-aligned in `block`, over the pools of this device, as floats."""
        num_pages, num_local = -(-num_slots // self.page), block.k.shape[1]
        page = (over_heads.first_head(num_local) + jnp.arange(num_local, dtype=jnp.int32)[:, None]) * num_pages
        page = page + jnp.arange(num_pages, dtype=jnp.int32)[None]  # i32[K pages], numbered over all devices
        length = over_heads.gather((block.pos >= 0).sum(-1, dtype=jnp.int32))
        owner, token = _assign_pages(length, page, self.page)
        is_used = token >= 0
        source = jnp.where(is_used, jnp.repeat(owner, self.page, -1) * block.pos.shape[2] + token, 0)

        def take_pages(x: Array) -> Array:
            # A page's owner may be a head of another device; this is the only time that tokens cross between devices.
            x = over_heads.gather(x)
            tokens = x.reshape(x.shape[0], -1, *x.shape[3:])
            index = source.reshape(*source.shape[:1], -1, *(1,) * (tokens.ndim - 2))
            return jnp.take_along_axis(tokens, index, 1).reshape(*source.shape, *tokens.shape[2:])

        pos = jnp.where(is_used, take_pages(block.pos), -1)
        # Keys lose their rotation, where the codec asks so, before a page holds the tokens of another head.
        k = take_pages(storage.in_pages(self.page).keys_to_store(block))
        bias = None if block.bias is None else take_pages(block.bias)
        return PagePools(k, take_pages(block.v), pos, owner, bias)

    def encode_placed(self, storage: KVStorage, placed: PagePools, num_slots: int) -> PagePools:
        num_pages, storage = -(-num_slots // self.page), storage.in_pages(self.page)
        if num_pages < placed.owner.shape[2]:
            # Heads have pages one after the other, through all pools, so that only the last ones are empty.
            placed = jax.tree.map(lambda x: _take_first_pages(x, placed.owner.shape[2], num_pages), placed)
        k, v = storage.k.encode(placed.k, placed.pos), storage.v.encode(placed.v, placed.pos)
        return dataclasses.replace(placed, k=k, v=v)

    def read(self, storage: KVStorage, state: LayerState, q: Array, q_pos: Array) -> Partial:
        store: PagePools = state.side_store
        B, num_local = q.shape[:2]
        owner = store.owner.reshape(B, -1)

        def split_pages(x: Array) -> Array:
            return x.reshape(B, owner.shape[1], self.page, *x.shape[3:])

        bias = None if store.bias is None else split_pages(store.bias)
        pools = storage.in_pages(self.page).decode(store.k, store.v, store.pos)
        block = KVBlock(split_pages(pools.k), split_pages(pools.v), split_pages(store.pos), bias)

        def attend(q: Array, q_pos: Array) -> Partial:
            all_q = over_heads.gather(q)
            owners_q = jnp.take_along_axis(all_q, jnp.maximum(owner, 0)[:, :, None, None, None], 1)
            is_short = q.shape[2] * q.shape[3] <= FEW_QUERIES and self.page < LONG_PAGE_SLOTS
            attend_pages = _attend_side_by_side if is_short else attend_dense
            part = attend_pages(owners_q, block, q_pos, storage.spec.rule)
            merged = _merge_by_owner(part, owner, all_q.shape[1])
            first = over_heads.first_head(num_local)
            return Partial(*(lax.dynamic_slice_in_dim(x, first, num_local, 1) for x in merged))

        # Every page reads a copy of its owner's queries, so that only few of them are taken at a time.
        return map_query_blocks(attend, q, q_pos, 64)

    def empty_bytes(self, store: PagePools, slots: Slots | None = None, prompt: int | None = None) -> dict[str, int]:
        B, K, R = store.pos.shape
        if slots is None or prompt is None:
            # Only pages without an owner are empty: a page with one token costs a whole page.
            is_owned = to_numpy(store.owner) >= 0
            pages = (is_owned.sum((1, 2)) / K).tolist()  # of each pool, in the mean
        elif (known := self._pages_by_length(prompt)) is not None:
            pages = [int(known[prompt]) / K] * B
        else:  # a head needs the most pages for its tokens when the last one holds a single token
            pages = [min(slots.kept + self.page - 1, R) / self.page] * B
        total = bytes_beyond(store, R, [count * self.page for count in pages])
        # A codec wrapper nests its inner codec's arrays, so paged ones are searched at any depth.
        stored = jax.tree.leaves((store.k, store.v), is_leaf=lambda x: isinstance(x, PagedArrays))
        paged = [x for x in stored if isinstance(x, PagedArrays) and self.page > 1]
        of_pages = bytes_beyond(paged, R // self.page, pages)
        return {kind: size + of_pages[kind] for kind, size in total.items()}

    def positions(self, store: PagePools) -> Array:
        """i32[B K S], where S counts the slots of all pools: a head's row has -1 in other heads' pages."""
        B, K, R = store.pos.shape
        owner = jnp.repeat(store.owner, self.page, -1).reshape(B, 1, K * R)
        is_own = owner == jnp.arange(K, dtype=jnp.int32)[None, :, None]
        return jnp.where(is_own, store.pos.reshape(B, 1, K * R), -1)

    def visible_block(self, storage: KVStorage, store: PagePools) -> KVBlock:
        pools = storage.in_pages(self.page).decode(store.k, store.v, store.pos)
        k, v = (x.reshape(x.shape[0], 1, -1, x.shape[3]) for x in (pools.k, pools.v))
        return KVBlock(k, v, self.positions(store))

    def check(self, components: Components) -> None:
        """Raises IncompatibleMethod for other components of the method that unequal heads cannot work with."""
        m = components
        if m.select is None:
            raise IncompatibleMethod(
                "component `side_store` divides what a selection keeps among the heads and has none to "
                "stand on; compose it with one, as in 'snapkv:budget=256 + adakv'"
            )
        not_in_pages = "it codes tokens together, or each head in its own way, and a page lies in the place of any"
        reasons = (
            ("select", m.select.scope == "layer", "with per='layer' all heads keep the same tokens"),
            (
                "layer_budgets",
                m.layer_budgets is not None and not m.layer_budgets.by_head,
                "it gives all heads of a layer equally many",
            ),
            ("decode", m.decode is not None, "a policy takes tokens out of the slots, and the prompt's lie in pages"),
            ("read", not isinstance(m.read, Full), "it chooses among the slots, and the prompt's tokens lie in pages"),
            ("k", m.k.in_pages(self.page) is None, not_in_pages),
            ("v", m.v.in_pages(self.page) is None, not_in_pages),
        )
        for name, cannot, reason in reasons:
            if cannot:
                raise IncompatibleMethod(
                    f"component `side_store` gives heads unequal lengths and cannot work with component `{name}`, "
                    f"{type(getattr(m, name)).__name__}: {reason}; leave one of them out, or let every head keep "
                    "equally many tokens (level=head, where it has a `level`)"
                )


def _take_first_pages(x: Array, num_pages: int, num_taken: int) -> Array:
    """Lays the first pages of K pools [B K R ..] of `num_pages` into K pools of `num_taken` pages."""
    B, K, R = x.shape[:3]
    slots = K * num_taken * (R // num_pages)
    return x.reshape(B, K * R, *x.shape[3:])[:, :slots].reshape(B, K, slots // K, *x.shape[3:])


def _assign_pages(length: Array, page: Array, page_slots: int) -> tuple[Array, Array]:
    """Assigns pages to heads in order, to each head as many as its tokens, i32[B K], need.

    Returns the head of each of this device's pages, numbers i32[K P] -> i32[B K P], and the token of that head in each
    of their slots, i32[B K R]; -1 where unused.
    """
    num_pages = -(-length // page_slots)
    end = jnp.cumsum(num_pages, 1, dtype=jnp.int32)
    owner = (page[None, :, :, None] >= end[:, None, None]).sum(-1, dtype=jnp.int32)
    is_used = owner < length.shape[1]
    head = jnp.where(is_used, owner, 0).reshape(length.shape[0], -1)
    first, num_tokens = (jnp.take_along_axis(x, head, 1).reshape(owner.shape) for x in (end - num_pages, length))
    slot_in_page = jnp.arange(page_slots, dtype=jnp.int32)[None, None, None]
    token = (page[None] - first)[..., None] * page_slots + slot_in_page
    token = jnp.where(is_used[..., None] & (token < num_tokens[..., None]), token, -1)
    return jnp.where(is_used, owner, -1), token.reshape(*owner.shape[:2], -1)


def _attend_side_by_side(q: Array, block: KVBlock, q_pos: Array, rule: Rule) -> Partial:
    """`attend_dense` for pages as heads, q [B P G T H], with the logits of all pages in one row for each query."""
    B, P, G, T, H = q.shape
    dims = (((3,), (3,)), ((0, 1), (0, 1)))  # keys first: as the second operand XLA:CPU would transpose them
    s = lax.dot_general(block.k, q.reshape(B, P, G * T, H), dims, preferred_element_type=jnp.float32) * H**-0.5
    s = jnp.moveaxis(rule.cap(s).reshape(B, -1, G, T), 1, 3)[:, None]  # [B 1 G T P*page]
    if block.bias is not None:
        s = s + block.bias.reshape(B, 1, 1, 1, -1)
    s = jnp.where(visible(block.pos.reshape(B, 1, -1), q_pos, rule), s, MASKED_LOGIT)[:, 0]
    m = lax.stop_gradient(s.reshape(B, G, T, P, -1).max(-1))  # as in `weights`
    p = jnp.where(s > MASKED_LOGIT / 2, jnp.exp(s - jnp.repeat(m, s.shape[3] // P, -1)), 0.0)
    p, m = jnp.moveaxis(p.reshape(B, G, T, P, -1), 3, 1), jnp.moveaxis(m, 3, 1)
    return Partial(mix(p, block.v), m, p.sum(-1))


def _merge_by_owner(part: Partial, owner: Array, num_heads: int) -> Partial:
    """Merges partials of this device's pages [B P G T ..] by log-sum-exp into those of all heads [B K G T ..]."""
    is_own = owner[:, :, None] == jnp.arange(num_heads, dtype=jnp.int32)[None, None]  # [B P K]
    m = over_heads.max(jnp.where(is_own[..., None, None], part.m[:, :, None], MASKED_LOGIT))[:, 0]
    weight = jnp.exp(part.m - jnp.take_along_axis(m, jnp.maximum(owner, 0)[:, :, None, None], 1))

    def sum_pages(x: Array) -> Array:
        local = jnp.einsum("bpk,bp...->bk...", is_own.astype(jnp.float32), x, precision=lax.Precision.HIGHEST)
        return over_heads.sum(local[:, None])[:, 0]

    return Partial(sum_pages(weight[..., None] * part.o), m, sum_pages(weight * part.l))
