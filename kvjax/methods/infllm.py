"""InfLLM: a sliding window, and blocks of the past fetched from host memory by what their best keys say."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.codecs.base import Host, Plain
from kvjax.cache.eviction.decode_policy import check_minimum
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.cache.readers.base import Reader, ReadResult, map_query_blocks
from kvjax.cache.readers.retrieval import slot_lookup
from kvjax.cache.readers.ring_buffer import RingBuffer
from kvjax.core import memory
from kvjax.core.attention import MASKED_LOGIT, combine, mix, scores, visible, weights
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads, vary
from kvjax.core.types import Array, KVBlock, Partial, pytree
from kvjax.errors import KvjaxError
from kvjax.methods.registry import register_method


@pytree
class Recent:
    """What the device holds beside the rows of all tokens: the latest ones again, and what blocks are found by."""

    k: memory.Buffer  # [B K P H] after RoPE, in the P places of a `RingBuffer`
    v: memory.Buffer  # [B K P H]
    mass: Array  # f32[B K G P], attention received while inside the window
    formed: Array  # i32[B], blocks so far
    keys: Array | None  # [B K G blocks H], the representative key of each block, without RoPE


class Tokens(NamedTuple):
    """Some of the tokens held, and their slots."""

    block: KVBlock  # [B K n H]; keys of far tokens are float32, without RoPE
    slot: Array  # i32[B 1|K n], -1 where there is none


@dataclasses.dataclass(frozen=True)
class Blocks(Reader):
    """Sinks, a window, and the `topk` most relevant blocks of the past (Xiao et al. 2024, arXiv 2402.04617, section 3).

    Tokens come in chunks of at most `prompt_chunk` queries (one when decoding); a prompt too, so its attention is
    restricted. A query reads the `local` latest tokens as they are, its own included. Everything older counts as far:
    the first `sinks` tokens, those that have not become a block yet, and the blocks looked up for the chunk. Far keys
    carry no RoPE and the query the angle of position local - 1, so all far tokens are equally distant. One softmax runs
    over both parts. After a chunk, while block + local tokens or more lie behind the sinks and the blocks, the oldest
    `block` of them become a block; it can be looked up from the next chunk on. Its key, per query head, is the mean of
    the keys without RoPE of the `representatives` tokens with the most attention mass, gathered over the queries that
    had them in their window. A lookup compares it with the mean query of the chunk at the far angle, summed over all
    heads: one set per layer, or per key/value head with per_head.

    Rows of all tokens lie with the method's codecs, where those of a block are fetched. Behind a selection the prompt's
    attention is exact, "latest" counts the tokens that are left, and since nobody has watched their mass, the key of a
    block of the prompt is the mean over all of its tokens.

    A chunk is what one call brings (longer calls are cut every `prompt_chunk` tokens), and its tokens share one lookup:
    it equals single steps as long as all blocks are taken, not when there are more, as in the paper. Tokens of a call
    that are not kept make a chunk of their own. What differs from the authors' code: blocks are always fetched (no LRU
    cache on the device); per_head sums over the query heads of a key/value head; of equal scores the older block comes
    first.
    """

    block: int = 128
    sinks: int = 128
    local: int = 4096
    topk: int = 16
    representatives: int = 4
    prompt_chunk: int = 512
    per_head: bool = False

    supports_eviction = False  # a block is made of neighbours
    unbounded_length = True  # beyond the window all tokens are equally far

    def __post_init__(self):
        fields = {name: (getattr(self, name), 1) for name in ("block", "local", "topk", "representatives")}
        check_minimum("InfLLM", sinks=(self.sinks, 0), **fields, chunk=(self.prompt_chunk, 1))
        if self.prompt_chunk > self.local:
            raise KvjaxError(
                f"chunk of InfLLM must not exceed local={self.local}, got {self.prompt_chunk}; use {self.local}"
            )
        if self.representatives > self.block:
            raise KvjaxError(
                f"representatives of InfLLM must not exceed block={self.block}, got {self.representatives}; "
                f"use {self.block} or fewer"
            )

    def init_state(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Recent:
        B, K, S, _ = block.k.shape
        ring, most = self._ring(S), max(S - self.sinks - self.local, 0) // self.block
        n = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        formed = jnp.clip((n - self.sinks - self.local) // self.block, 0, most)
        slot = ring.slots(n, self._first(formed))
        mass = jnp.zeros((B, K, spec.num_groups, ring.places), jnp.float32)
        keys = self._mean_keys(block, formed, most, spec) if most else None
        return Recent(ring.fill(block.k, slot), ring.fill(block.v, slot), mass, formed, keys)

    def append(self, reader_state: Recent, new_tokens: KVBlock, at: Array, spec: LayerSpec) -> Recent:
        ring = self._ring_of(reader_state.mass)
        slot = at[:, :, None] + jnp.arange(new_tokens.pos.shape[2], dtype=jnp.int32)[None, None]
        place = jnp.where(new_tokens.pos >= 0, ring.place(slot), ring.places)  # padding is dropped
        n = at[:, 0] + (new_tokens.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        new = ring.slots(n, self._first(reader_state.formed)) >= at[:, :, None]
        mass = jnp.where(new[:, :, None], 0.0, reader_state.mass)
        k, v = ring.put(reader_state.k, new_tokens.k, place), ring.put(reader_state.v, new_tokens.v, place)
        return dataclasses.replace(reader_state, k=k, v=v, mass=mass)

    def read(
        self,
        layer: MethodLayer,
        state: LayerState,
        q: Array,
        q_pos: Array,
        other_partial: Partial | None = None,
        cross_layer: Any = None,
    ) -> ReadResult:
        assert state.n is not None
        rope, n, own_slots = layer.spec.rope, state.n[:, None], slot_lookup(state, q_pos)
        kept = (q_pos >= 0) & (own_slots(q_pos) < n)
        reader_state = self._form(layer, state, state.n - kept.sum(-1, dtype=jnp.int32))
        far_q = rope.rotate_queries(rope.unrotate_queries(q, q_pos), jnp.full_like(q_pos, self.local - 1))
        near = self._near(state, reader_state)
        left = self._left(layer, state, reader_state, near, q.shape[3])
        found = [] if reader_state.keys is None else [self._recall(layer, state, reader_state, far_q, kept)]
        if found and other_partial is not None:
            found.append(self._recall(layer, state, reader_state, far_q, (q_pos >= 0) & ~kept))

        def attend(q: Array, t: Array, far_q: Array) -> tuple[Partial, Array]:
            own = own_slots(t)
            kept = (own < n)[:, None, None, :, None]
            p, part = _weighed(q, near.block, self._sees(layer, near, t, own)[0])
            total = part
            for tokens, asked in ((left, True), *zip(found, (kept, ~kept), strict=False)):
                seen = self._sees(layer, tokens, t, own)[1] & asked
                total = combine(total, _weighed(far_q, tokens.block, seen)[1])
            share = jnp.exp(part.m - total.m) / jnp.maximum(total.l, 1e-30)
            return total, jnp.where(kept, p * share[..., None], 0.0).sum(3, keepdims=True)

        part, mass = map_query_blocks(attend, q, q_pos, 64, far_q)  # of mass, one sum for each block of queries
        return ReadResult(
            part, dataclasses.replace(reader_state, mass=reader_state.mass + mass.sum(3)), cross_layer=cross_layer
        )

    def _sees(self, layer: MethodLayer, tokens: Tokens, t: Array, own: Array) -> tuple[Array, Array]:
        """Which tokens queries at t i32[B T], in slots own i32[B T], see as recent ones and which as old ones."""
        behind = own[:, None, None, :, None] - tokens.slot[:, :, None, None]
        inside = visible(tokens.block.pos, t, layer.spec.window)
        return inside & (behind < self.local), inside & (behind >= self.local)

    def _ring(self, slots: int) -> RingBuffer:
        """Places for recent tokens, of a layer of so many slots: whole blocks, so that none wraps around.

        The window, an unfinished block, the last chunk and this one: tokens are written before blocks are formed.
        """
        most = self.local + self.block - 1 + 2 * self.prompt_chunk
        return RingBuffer(self.sinks, -(-max(min(most, slots - self.sinks), 1) // self.block) * self.block)

    def _ring_of(self, mass: Array) -> RingBuffer:
        return RingBuffer(self.sinks, mass.shape[3] - self.sinks)

    def _first(self, blocks: Array) -> Array:
        """The slot behind so many blocks."""
        return self.sinks + blocks * self.block

    def _mean_keys(self, block: KVBlock, formed: Array, most: int, spec: LayerSpec) -> Array:
        """[B K G blocks H]: the mean key of each block that a prompt forms at once."""
        B, K, _, H = block.k.shape
        size = self.block
        rows = lax.stop_gradient(block.k)  # they only say which blocks are read

        def add(i: Array, keys: Array) -> Array:
            k, pos = (lax.dynamic_slice_in_dim(x, self.sinks + i * size, size, 2) for x in (rows, block.pos))
            mean = jnp.where((i < formed)[:, None, None], spec.rope.unrotate(k, pos).mean(2), 0.0)
            return keys.at[:, :, :, i].set(mean[:, :, None].astype(keys.dtype))

        return lax.fori_loop(0, formed.max(), add, vary(jnp.zeros((B, K, spec.num_groups, most, H), block.k.dtype)))

    def _form(self, layer: MethodLayer, state: LayerState, n: Array) -> Recent:
        """Forms blocks of the first n i32[B] tokens, until fewer than block + local of them are left."""
        reader_state = state.reader_state
        if reader_state.keys is None:
            return reader_state
        target = jnp.minimum((n - self.sinks - self.local) // self.block, reader_state.keys.shape[3])

        def more(so_far: tuple[Array, Array]) -> Array:
            return (target > so_far[0]).any()

        def one(so_far: tuple[Array, Array]) -> tuple[Array, Array]:
            formed, keys = so_far
            due = target > formed
            B, K, G, N, _ = keys.shape
            key = self._representative(layer, state, formed).astype(keys.dtype)
            column = jnp.where(due, formed, N)[:, None, None]
            index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.arange(G)[None, None], column)
            return formed + due.astype(jnp.int32), keys.at[index].set(key, mode="drop")

        with jax.named_scope("form"):
            formed, keys = lax.while_loop(more, one, vary((reader_state.formed, lax.stop_gradient(reader_state.keys))))
        return dataclasses.replace(reader_state, formed=formed, keys=keys)

    def _representative(self, layer: MethodLayer, state: LayerState, number: Array) -> Array:
        """f32[B K G H]: the key of the block of this number i32[B], whose tokens are still in the ring."""
        B, K = state.reader_state.mass.shape[:2]
        slot = self._first(number)[:, None, None] + jnp.arange(self.block, dtype=jnp.int32)[None, None]
        place = jnp.broadcast_to(self._ring_of(state.reader_state.mass).place(slot), (B, K, self.block))
        bare = layer.spec.rope.unrotate(memory.gather_tokens(state.reader_state.k, place), _of(state.pos, slot))
        mass = jnp.take_along_axis(state.reader_state.mass, place[:, :, None], 3)
        best = lax.top_k(mass, self.representatives)[1]  # [B K G r]
        return lax.stop_gradient(jnp.take_along_axis(bare[:, :, None], best[..., None], 3).mean(3))

    def _near(self, state: LayerState, reader_state: Recent) -> Tokens:
        """Sinks and ring, as they came."""
        assert state.n is not None
        slot = self._ring_of(reader_state.mass).slots(state.n, self._first(reader_state.formed))
        return _tokens(state, memory.unpack(reader_state.k), memory.unpack(reader_state.v), slot)

    def _left(self, layer: MethodLayer, state: LayerState, reader_state: Recent, near: Tokens, fresh: int) -> Tokens:
        """Sinks, and what is left behind the last block and may lie outside the window of one of so many queries."""
        ring = self._ring_of(reader_state.mass)
        count = min(self.block - 1 + fresh, ring.size)
        recent = ring.place(self._first(reader_state.formed)[:, None] + jnp.arange(count, dtype=jnp.int32)[None])
        early = jnp.broadcast_to(jnp.arange(self.sinks, dtype=jnp.int32)[None], (recent.shape[0], self.sinks))
        place = jnp.concatenate([early, recent], 1)[:, None]
        k, v = memory.take(near.block.k, place), memory.take(near.block.v, place)
        return _far(layer, _tokens(state, k, v, _of(near.slot, place)))

    def _recall(
        self, layer: MethodLayer, state: LayerState, reader_state: Recent, far_q: Array, asking: Array
    ) -> Tokens:
        """The blocks looked up for some of the queries far_q f32[B K G T H], those asking bool[B T]."""
        assert reader_state.keys is not None
        B, K, _, N, _ = reader_state.keys.shape
        real = asking[:, None, None, :, None]
        mean = jnp.where(real, far_q, 0.0).sum(3) / jnp.maximum(real.sum(3, dtype=jnp.int32), 1).astype(jnp.float32)
        score = jnp.einsum("bkgh,bkgnh->bkn", mean, reader_state.keys.astype(jnp.float32))
        score = score if self.per_head else over_heads.sum(score)
        there = jnp.arange(N, dtype=jnp.int32)[None, None] < reader_state.formed[:, None, None]
        score = jnp.where(there, score, -jnp.inf)
        best, chosen = lax.top_k(score, min(self.topk, N))  # [B K|1 n]
        slot = self._first(chosen)[..., None] + jnp.arange(self.block, dtype=jnp.int32)[None, None, None]
        slot = jnp.where((best > -jnp.inf)[..., None], slot, -1).reshape(B, score.shape[1], -1)
        at = jnp.broadcast_to(jnp.maximum(slot, 0), (B, K, slot.shape[2]))
        with jax.named_scope("recall"):
            k, v = layer.key_rows(state.k, at, _of(state.pos, at)), layer.v.gather(state.v, at)
        return _far(layer, _tokens(state, k, v, slot))


def _tokens(state: LayerState, k: Array, v: Array, slot: Array) -> Tokens:
    """Rows k, v [B K n H] of slots i32[B 1|K n], with what the state says of these."""
    pos = jnp.where(slot >= 0, _of(state.pos, slot), -1)
    bias = None if state.bias is None else _of(state.bias, slot)
    return Tokens(KVBlock(k, v, pos, bias), slot)


def _far(layer: MethodLayer, tokens: Tokens) -> Tokens:
    """The same as far tokens: keys without RoPE, and zeros where there is no token."""
    bare = layer.spec.rope.unrotate(tokens.block.k, tokens.block.pos)
    return tokens._replace(block=dataclasses.replace(tokens.block, k=bare).clean())


def _of(x: Array, at: Array) -> Array:
    """x [B 1|K S] at i32[B 1|K n], clipped -> [B 1|K n]."""
    heads = max(x.shape[1], at.shape[1])
    x, at = (jnp.broadcast_to(a, (a.shape[0], heads, a.shape[2])) for a in (x, at))
    return jnp.take_along_axis(x, at, 2, mode="clip")


def _weighed(q: Array, block: KVBlock, seen: Array) -> tuple[Array, Partial]:
    """Queries [B K G T H] over what they see of a block: (unnormalised weights f32[B K G T n], attention)."""
    s = scores(q, block.k)
    if block.bias is not None:
        s = s + block.bias[:, :, None, None]
    p, m, l = weights(jnp.where(seen, s, MASKED_LOGIT))
    return p, Partial(mix(p, block.v), m, l)


@register_method(example="infllm:block=64,sinks=64,local=256,topk=4,chunk=128", family="host memory")
def infllm(
    block: int = 128,
    sinks: int = 128,
    local: int = 4096,
    topk: int = 16,
    representatives: int = 4,
    chunk: int = 512,
    per_head: bool = False,
) -> Method:
    """Reads the sinks, a local window, and the most relevant blocks of the past, which lie in pinned host memory.

    The attention of the prompt is restricted in the same way.

    Formula:
      key(block) = mean of the keys before RoPE of its tokens with the most attention mass; score(block) = mean query of
      the chunk at the far angle times key(block), summed over heads

    Differs:
      Blocks are fetched for every chunk: there is no cache of blocks on the device. As in the paper the tokens of one
      call share a lookup: a question fed at once reads other blocks than one fed token by token.

    Args:
      block: tokens of a block.
      sinks: first tokens that are always read.
      local: tokens of the local window.
      topk: blocks that are read.
      representatives: tokens whose mean key represents a block.
      chunk: prompt tokens that are processed at a time.
      per_head: whether each key/value head selects its blocks, instead of one set per layer.

    Reference:
      InfLLM, Xiao et al. 2024, arXiv 2402.04617, section 3
    """
    read = Blocks(block, sinks, local, topk, representatives, chunk, per_head)
    return Method(k=Host(Plain()), v=Host(Plain()), read=read)
