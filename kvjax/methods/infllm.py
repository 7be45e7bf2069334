"""InfLLM: a sliding window, and blocks of the past fetched from host memory by their most attended keys."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.readers.retrieval import slot_lookup


@kv.pytree
class InfLLMState:
    """A second copy of the latest tokens, and the keys that blocks are found by, on the device."""

    k: kv.memory.Buffer  # [B K P H] after RoPE, in the P places of a `RingBuffer`
    v: kv.memory.Buffer  # [B K P H]
    mass: kv.Array  # f32[B K G P], attention received while inside the window
    num_blocks: kv.Array  # i32[B], blocks so far
    keys: kv.Array | None  # [B K G blocks H], the representative key of each block, before RoPE


class SlotTokens(NamedTuple):
    """Some tokens of the cache, and their slots."""

    block: kv.KVBlock  # [B K n H]; keys of far tokens are float32, before RoPE
    slot: kv.Array  # i32[B 1|K n], -1 where there is none


@dataclasses.dataclass(frozen=True)
class BlockReader(kv.Reader):
    """Reads sinks, a window, and the `topk` most relevant blocks of the past (Xiao et al. 2024, 2402.04617, section 3).

    Tokens come in chunks of at most `prompt_chunk` queries (one when decoding). A prompt is read in chunks too, so its
    attention is restricted. A query reads the `local` latest tokens as usual, its own included. All older tokens are
    far: the first `sinks` tokens, those of no block yet, and the blocks recalled for the chunk. Far keys have no RoPE
    and the query has the angle of position local - 1, so all far tokens are equally distant. One softmax runs over both
    parts.

    After a chunk, while at least block + local tokens follow the sinks and the blocks, the oldest `block` of them
    become a block, which can be recalled from the next chunk on. Its key, per query head, is the mean of the pre-RoPE
    keys of the `representatives` tokens with the most attention mass, summed over the queries that had them in their
    window. A recall compares it with the mean query of the chunk at the far angle, summed over all heads: one set per
    layer, or per key/value head with per_head.

    All tokens are stored by the method's codecs, and blocks are fetched from there. Over a selection the prompt's
    attention is exact and "latest" counts the tokens that are left; their mass was not observed, so the key of a block
    of the prompt is the mean over all of its tokens.

    A chunk is one call (longer calls are cut every `prompt_chunk` tokens), and its tokens share one recall: it equals
    single steps as long as all blocks are read, not when there are more, as in the paper. Draft tokens of a call make a
    chunk of their own. The fields are the arguments of `infllm`; its `chunk` is `prompt_chunk`.
    """

    block: kv.PositiveInt = 128
    sinks: kv.NonNegativeInt = 128
    local: kv.PositiveInt = 4096
    topk: kv.PositiveInt = 16
    representatives: kv.PositiveInt = 4
    prompt_chunk: kv.PositiveInt = 512
    per_head: bool = False

    supports_eviction = False  # a block is a run of slots
    remembers_queries = True  # their attention mass
    unbounded_length = True  # beyond the window all tokens are equally far

    def __post_init__(self):
        kv.check_fields(self)
        if self.prompt_chunk > self.local:
            raise kv.KvjaxError(
                f"chunk of InfLLM must not exceed local={self.local}, got {self.prompt_chunk}; use {self.local}"
            )
        if self.representatives > self.block:
            raise kv.KvjaxError(
                f"representatives of InfLLM must not exceed block={self.block}, got {self.representatives}; "
                f"use {self.block} or fewer"
            )

    def init_state(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> InfLLMState:
        B, K, S, _ = block.k.shape
        # The window, an unfinished block, the last chunk and this one: tokens are written before blocks are formed.
        # Whole blocks, so that none of them wraps around.
        max_tokens = min(self.local + self.block - 1 + 2 * self.prompt_chunk, S - self.sinks)
        ring = kv.RingBuffer(self.sinks, -(-max(max_tokens, 1) // self.block) * self.block)
        max_blocks = max(S - self.sinks - self.local, 0) // self.block
        n = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        num_blocks = jnp.clip((n - self.sinks - self.local) // self.block, 0, max_blocks)
        slot = ring.slots(n, self._first_slot(num_blocks))
        mass = jnp.zeros((B, K, spec.num_groups, ring.places), jnp.float32)
        keys = self._mean_keys(block, num_blocks, max_blocks, spec) if max_blocks else None
        return InfLLMState(ring.fill(block.k, slot), ring.fill(block.v, slot), mass, num_blocks, keys)

    def append(
        self, reader_state: InfLLMState, new_tokens: kv.KVBlock, at: kv.Array, spec: kv.LayerSpec
    ) -> InfLLMState:
        ring = self._ring_from_mass(reader_state.mass)
        slot = at[:, :, None] + jnp.arange(new_tokens.pos.shape[2], dtype=jnp.int32)[None, None]
        place = jnp.where(new_tokens.pos >= 0, ring.place(slot), ring.places)  # padding is dropped
        n = at[:, 0] + (new_tokens.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        is_new = ring.slots(n, self._first_slot(reader_state.num_blocks)) >= at[:, :, None]
        mass = jnp.where(is_new[:, :, None], 0.0, reader_state.mass)
        k, v = ring.put(reader_state.k, new_tokens.k, place), ring.put(reader_state.v, new_tokens.v, place)
        return dataclasses.replace(reader_state, k=k, v=v, mass=mass)

    def read_bytes(self, storage: kv.KVStorage, state: kv.LayerState) -> kv.StepBytes:
        own: InfLLMState = state.reader_state
        total = kv.StepBytes.of_all(own) + kv.StepBytes(device_written=kv.StepBytes.of_all(own.mass).device)
        if own.keys is None:
            return total
        return total + storage.read_bytes(state, min(self.topk, own.keys.shape[3]) * self.block)

    def read(
        self,
        storage: kv.KVStorage,
        state: kv.LayerState,
        q: kv.Array,
        q_pos: kv.Array,
        other_partial: kv.Partial | None = None,
        cross_layer: Any = None,
    ) -> kv.ReadResult:
        assert state.n is not None
        rope, n, own_slots = storage.spec.rope, state.n[:, None], slot_lookup(state, q_pos)
        is_kept = (q_pos >= 0) & (own_slots(q_pos) < n)  # the others are drafts, which recall blocks of their own
        reader_state = self._form_blocks(storage, state, state.n - is_kept.sum(-1, dtype=jnp.int32))
        far_q = rope.rotate_queries(rope.unrotate_queries(q, q_pos), jnp.full_like(q_pos, self.local - 1))
        near_slot = self._ring_from_mass(reader_state.mass).slots(state.n, self._first_slot(reader_state.num_blocks))
        near = _slot_tokens(state, kv.memory.unpack(reader_state.k), kv.memory.unpack(reader_state.v), near_slot)
        unassigned = self._unassigned_tokens(storage, state, reader_state, near, q.shape[3])
        recalled, recalled_for_drafts = None, None
        if reader_state.keys is not None:
            recalled = self._recall_blocks(storage, state, reader_state, far_q, is_kept)
            if other_partial is not None:  # of drafts, or of what is outside of the state, which recalls nothing
                is_draft = (q_pos >= 0) & ~is_kept
                recalled_for_drafts = self._recall_blocks(storage, state, reader_state, far_q, is_draft)

        def attend(q: kv.Array, t: kv.Array, far_q: kv.Array, *others: kv.Array) -> tuple[kv.Partial, kv.Array]:
            own = own_slots(t)
            is_kept = (own < n)[:, None, None, :, None]
            p, window = _attend(q, near.block, self._visibility(storage, near, t, own)[0], storage.spec.rule)
            total = window
            for tokens, may_read in ((unassigned, True), (recalled, is_kept), (recalled_for_drafts, ~is_kept)):
                if tokens is None:
                    continue
                is_far = self._visibility(storage, tokens, t, own)[1] & may_read
                total = kv.attention.combine(total, _attend(far_q, tokens.block, is_far, storage.spec.rule)[1])
            # From weights relative to the window's own maximum to those of the softmax over all that a query reads.
            every = kv.attention.combine(total, kv.Partial(*others)) if others else total
            scale = jnp.exp(window.m - every.m) / jnp.maximum(every.l, 1e-30)
            return total, jnp.where(is_kept, p * scale[..., None], 0.0).sum(3, keepdims=True)

        # `map_query_blocks` concatenates along the axis of queries: mass has one sum for each block of queries there.
        # It cuts arrays into blocks, so that the other partial is given as its arrays.
        out, mass = kv.map_query_blocks(attend, q, q_pos, 64, far_q, *(other_partial or ()))
        reader_state = dataclasses.replace(reader_state, mass=reader_state.mass + mass.sum(3))
        return kv.ReadResult(out, reader_state, cross_layer=cross_layer)

    def _visibility(
        self, storage: kv.KVStorage, tokens: SlotTokens, t: kv.Array, own: kv.Array
    ) -> tuple[kv.Array, kv.Array]:
        """Masks the tokens that queries at t i32[B T], in slots own i32[B T], see in their window, and the far ones."""
        distance = own[:, None, None, :, None] - tokens.slot[:, :, None, None]
        is_visible = kv.attention.visible(tokens.block.pos, t, storage.spec.rule)
        return is_visible & (distance < self.local), is_visible & (distance >= self.local)

    def _ring_from_mass(self, mass: kv.Array) -> kv.RingBuffer:
        return kv.RingBuffer(self.sinks, mass.shape[3] - self.sinks)

    def _first_slot(self, block_index: kv.Array) -> kv.Array:
        return self.sinks + block_index * self.block

    def _mean_keys(self, block: kv.KVBlock, num_blocks: kv.Array, max_blocks: int, spec: kv.LayerSpec) -> kv.Array:
        """Averages the keys of each block that a prompt forms at once: [B K G blocks H]."""
        B, K, _, H = block.k.shape
        size = self.block
        all_keys = lax.stop_gradient(block.k)  # these keys only choose which blocks are read

        def add(i: kv.Array, keys: kv.Array) -> kv.Array:
            k, pos = (lax.dynamic_slice_in_dim(x, self.sinks + i * size, size, 2) for x in (all_keys, block.pos))
            mean = jnp.where((i < num_blocks)[:, None, None], spec.rope.unrotate(k, pos).mean(2), 0.0)
            return keys.at[:, :, :, i].set(mean[:, :, None].astype(keys.dtype))

        start = kv.vary(jnp.zeros((B, K, spec.num_groups, max_blocks, H), block.k.dtype))
        return lax.fori_loop(0, num_blocks.max(), add, start)

    def _form_blocks(self, storage: kv.KVStorage, state: kv.LayerState, n: kv.Array) -> InfLLMState:
        """Forms blocks of the first n i32[B] tokens, until fewer than block + local of them are left."""
        reader_state = state.reader_state
        if reader_state.keys is None:
            return reader_state
        target = jnp.minimum((n - self.sinks - self.local) // self.block, reader_state.keys.shape[3])
        ring = self._ring_from_mass(reader_state.mass)
        B, K, G, N, _ = reader_state.keys.shape

        def form_one(carry: tuple[kv.Array, kv.Array]) -> tuple[kv.Array, kv.Array]:
            num_blocks, keys = carry
            # The block's tokens are still in the ring; the mean of its most attended keys becomes its key.
            slot = self._first_slot(num_blocks)[:, None, None] + jnp.arange(self.block, dtype=jnp.int32)[None, None]
            place = jnp.broadcast_to(ring.place(slot), (B, K, self.block))
            pre_rope = storage.spec.rope.unrotate(
                kv.memory.gather_tokens(reader_state.k, place), _take_slots(state.pos, slot)
            )
            mass = jnp.take_along_axis(reader_state.mass, place[:, :, None], 3)
            best = kv.top_k(mass, self.representatives)[1]  # [B K G r]
            key = lax.stop_gradient(jnp.take_along_axis(pre_rope[:, :, None], best[..., None], 3).mean(3))
            # Sequences differ in their numbers of blocks; a write at index N, where none is due, is dropped.
            is_due = target > num_blocks
            column = jnp.where(is_due, num_blocks, N)[:, None, None]
            index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.arange(G)[None, None], column)
            return num_blocks + is_due.astype(jnp.int32), keys.at[index].set(key.astype(keys.dtype), mode="drop")

        with jax.named_scope("form"):
            start = kv.vary((reader_state.num_blocks, lax.stop_gradient(reader_state.keys)))
            num_blocks, keys = lax.while_loop(lambda carry: (target > carry[0]).any(), form_one, start)
        return dataclasses.replace(reader_state, num_blocks=num_blocks, keys=keys)

    def _unassigned_tokens(
        self, storage: kv.KVStorage, state: kv.LayerState, reader_state: InfLLMState, near: SlotTokens, num_new: int
    ) -> SlotTokens:
        """Returns sinks, and the tokens of no block that may lie outside the window of one of `num_new` queries."""
        ring = self._ring_from_mass(reader_state.mass)
        count = min(self.block - 1 + num_new, ring.size)
        recent = self._first_slot(reader_state.num_blocks)[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        sinks = jnp.broadcast_to(jnp.arange(self.sinks, dtype=jnp.int32)[None], (recent.shape[0], self.sinks))
        place = jnp.concatenate([sinks, ring.place(recent)], 1)[:, None]
        k, v = kv.memory.take(near.block.k, place), kv.memory.take(near.block.v, place)
        return _slot_tokens(state, k, v, _take_slots(near.slot, place), storage.spec.rope)

    def _recall_blocks(
        self,
        storage: kv.KVStorage,
        state: kv.LayerState,
        reader_state: InfLLMState,
        far_q: kv.Array,
        is_asking: kv.Array,
    ) -> SlotTokens:
        """Fetches the best blocks for the mean of the queries far_q f32[B K G T H] that ask, bool[B T]."""
        assert reader_state.keys is not None
        B, K, _, N, _ = reader_state.keys.shape
        real = is_asking[:, None, None, :, None]
        mean = jnp.where(real, far_q, 0.0).sum(3) / jnp.maximum(real.sum(3, dtype=jnp.int32), 1).astype(jnp.float32)
        score = jnp.einsum("bkgh,bkgnh->bkn", mean, reader_state.keys.astype(jnp.float32))
        score = score if self.per_head else kv.over_heads.sum(score)
        exists = jnp.arange(N, dtype=jnp.int32)[None, None] < reader_state.num_blocks[:, None, None]
        score = jnp.where(exists, score, -jnp.inf)
        best, chosen = kv.top_k(score, min(self.topk, N))  # [B K|1 n]
        slot = self._first_slot(chosen)[..., None] + jnp.arange(self.block, dtype=jnp.int32)[None, None, None]
        slot = jnp.where((best > -jnp.inf)[..., None], slot, -1).reshape(B, score.shape[1], -1)
        at = jnp.broadcast_to(jnp.maximum(slot, 0), (B, K, slot.shape[2]))
        with jax.named_scope("recall"):
            k, v = storage.gather(state, at, _take_slots(state.pos, at))
        return _slot_tokens(state, k, v, slot, storage.spec.rope)


def _slot_tokens(
    state: kv.LayerState, k: kv.Array, v: kv.Array, slot: kv.Array, rope: kv.Rope | None = None
) -> SlotTokens:
    """Adds the positions and biases of slots i32[B 1|K n] to their keys and values [B K n H].

    With a `rope` they become far tokens: keys without RoPE, and zeros where there is no token.
    """
    pos = jnp.where(slot >= 0, _take_slots(state.pos, slot), -1)
    bias = None if state.bias is None else _take_slots(state.bias, slot)
    if rope is None:
        return SlotTokens(kv.KVBlock(k, v, pos, bias), slot)
    return SlotTokens(kv.KVBlock(rope.unrotate(k, pos), v, pos, bias).clean(), slot)


def _take_slots(x: kv.Array, at: kv.Array) -> kv.Array:
    """Takes x [B 1|K S] at i32[B 1|K n], clipped -> [B 1|K n]."""
    heads = max(x.shape[1], at.shape[1])
    x, at = (jnp.broadcast_to(a, (a.shape[0], heads, a.shape[2])) for a in (x, at))
    return jnp.take_along_axis(x, at, 2, mode="clip")


def _attend(
    q: kv.Array, block: kv.KVBlock, is_visible: kv.Array, rule: kv.attention.Rule
) -> tuple[kv.Array, kv.Partial]:
    """Attends queries [B K G T H] to a block; also returns their unnormalized weights f32[B K G T n]."""
    s = rule.cap(kv.attention.scores(q, block.k))
    if block.bias is not None:
        s = s + block.bias[:, :, None, None]
    p, m, l = kv.attention.weights(jnp.where(is_visible, s, kv.MASKED_LOGIT))
    return p, kv.Partial(kv.attention.mix(p, block.v), m, l)


@kv.register_method(example="infllm:block=64,sinks=64,local=256,topk=4,chunk=128", family="host memory")
def infllm(
    block: int = 128,
    sinks: int = 128,
    local: int = 4096,
    topk: int = 16,
    representatives: int = 4,
    chunk: kv.PositiveInt = 512,
    per_head: bool = False,
) -> kv.Method:
    """Reads the sinks, a local window, and the most relevant blocks of the past, which lie in pinned host memory.

    The attention of the prompt is restricted in the same way.

    Formula:
      key(block) = mean of the keys before RoPE of its tokens with the most attention mass; score(block) = mean query of
      the chunk at the far angle times key(block), summed over heads

    Differs:
      Blocks are fetched for every chunk: there is no cache of blocks on the device. With per_head scores are summed
      over the query heads of a key/value head; ties go to the older block. As in the paper the tokens of one call share
      a lookup: a question fed at once reads other blocks than one fed token by token.

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
    read = BlockReader(block, sinks, local, topk, representatives, chunk, per_head)
    return kv.Method(k=kv.Host(kv.Plain()), v=kv.Host(kv.Plain()), read=read)
