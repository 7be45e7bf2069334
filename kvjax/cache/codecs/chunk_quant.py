"""Codecs that quantize a prompt as a whole, and then every full chunk of decoded tokens, per channel or per token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.codecs import bit_packing, ring_order
from kvjax.cache.components import Codec
from kvjax.core import memory
from kvjax.core.gradients import refuse_gradient
from kvjax.core.mesh import vary
from kvjax.core.types import Array, exportable, pytree
from kvjax.errors import KvjaxError
from kvjax.utils.abstract import abstract
from kvjax.utils.parameter_types import NonNegativeInt, check_fields


@exportable
class ChunkCodes(NamedTuple):
    """A prompt, or a chunk of decoded tokens, as codes, with the numbers that restore it.

    A token has A numbers of its own, its chunk has C; U, below, counts the prompt and all chunks.
    """

    codes: Array  # uint32[B K T H]
    own: Array | None  # [B K T A], the numbers of each token
    shared: Array | None  # [B K 1 C], the numbers of the chunk


def compute_if(is_needed: Array, fun: Callable[..., Any], *args: Array) -> Any:
    """Computes `fun` of arrays where bool[] `is_needed`, and else returns zeros in its place.

    A chunk is full once in many steps, and the others skip its work. The stored arrays stay outside of the condition:
    a compiler copies what passes through it, and writes what is not due to nowhere at no cost.
    """
    # Made outside of the condition: JAX transforms its branches once more, where they would vary already.
    zeros = vary(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fun, *args)))
    return lax.cond(is_needed, fun, lambda *_: zeros, *args)


@pytree
class ChunkState:
    """Tokens 0..num_quantized-1 as codes; the newest ones are exact, token i at index i modulo P of `recent`.

    `ChunkCodec.pack_tokens` makes the buffers with an entry for each token; those of a ring are longer than its slots.
    """

    codes: memory.Buffer  # uint32 words [B K S W], packed along channels
    own: memory.Buffer | None  # [B K S A]
    shared: memory.Buffer | None  # [B K U C], of the prompt, then of each chunk
    recent: Array  # [B K P H]
    num_prompt: Array  # i32[B]
    num_quantized: Array  # i32[B]; in a ring, of all rounds


def _add_axes(n: Array, ndim: int) -> Array:
    """Reshapes numbers of each sequence, i32[B], to `ndim` axes, i32[B 1 ..]."""
    return n.reshape(-1, *(1,) * (ndim - 1))


@dataclasses.dataclass(frozen=True)
class ChunkCodec(Codec):
    """The base of codecs that quantize chunks; a subclass defines `quantize` and `restore`.

    Decoded tokens stay exact until there are `every` of them. At the start of the next step these become codes, and
    share numbers with each other only. Codes are made once, from real tokens of one sequence and head.

    In a ring a chunk consists of the tokens that it has without one, so that its codes are the same. Chunks begin where
    the prompt ends, and one of them may reach beyond the last slot. Buffers therefore have `every` - 1 entries more
    than slots, and a chunk is written without a break: entry S + i belongs to slot i. A prompt that the ring does not
    hold whole is quantized from the tokens that it holds; their number is then known modulo the slots, which is all
    that the codec asks for.

    Args:
      bits: 1, 2, 3, 4 or 8. Words are padded where channels do not fill them.
      every: decoded tokens of a chunk; 0 for a codec that stores a prompt and nothing after it.
      ring_slots: slots of the ring that `in_ring` makes it for, 0 for none; fewer slots never begin anew.
    """

    bits: bit_packing.RowBits = 4
    every: NonNegativeInt = 0
    ring_slots: int = dataclasses.field(default=0, kw_only=True, repr=False, metadata={"hash_default": False})

    sequential_writes = True  # whether a query reads a token exactly depends on when the query comes
    supports_eviction = False  # the tokens of a chunk share numbers, so none of them can leave

    __post_init__ = check_fields

    @abstract
    def quantize(self, x: Array) -> ChunkCodes:
        """Quantizes real tokens x [B K T H], a prompt or a chunk."""
        ...

    @abstract
    def restore(self, codes: Array, own: Array | None, shared: Array | None) -> Array:
        """Restores tokens [B K n H] from codes uint32[B K n H], own [B K n A] and shared [B K 1|n C]."""
        ...

    def encode_chunk(self, x: Array) -> ChunkCodes:
        """`quantize`, which refuses to be differentiated."""
        return self.quantize(refuse_gradient(x, f"codes of {type(self).__name__}"))

    @property
    def ring_multiple(self) -> int | None:
        return 1 if self.every else None

    @property
    def ring_room(self) -> int:
        return self.every  # the codes in the slots of exact tokens are those of tokens out of sight

    def in_ring(self, num_slots: int) -> Codec:
        return dataclasses.replace(self, ring_slots=num_slots)

    def num_committed(self, stored: ChunkState, n: Array) -> Array:
        if not self.is_ring(stored):
            return stored.num_quantized
        # A prompt's number of tokens may be known modulo the slots alone, and fewer than these are exact.
        return n - (n - stored.num_quantized) % self.ring_slots

    def encode(self, x: Array, pos: Array) -> ChunkState:
        B, K, S, H = x.shape
        real = jnp.broadcast_to(pos >= 0, (B, K, S))[..., None]
        x = jnp.where(real, x, jnp.zeros((), x.dtype))
        # Empty slots repeat the first token, which changes no minimum and no maximum.
        coded = self.encode_chunk(jnp.where(real, x, x[:, :, :1]))
        own = None if coded.own is None else self.pack_tokens(jnp.where(real, coded.own, jnp.zeros((), x.dtype)))
        padding = [(0, 0), (0, 0), (0, self.num_chunks(S)), (0, 0)]
        n = ring_order.count_tokens(pos, self.ring_slots)
        return ChunkState(
            self.pack_tokens(self._pack(jnp.where(real, coded.codes, 0))),
            own,
            None if coded.shared is None else memory.pack(jnp.pad(coded.shared, padding)),
            # The whole prompt becomes codes, also its last partial chunk: ZipCache and MiKV keep nothing of it exact.
            jnp.zeros((B, K, min(self.every, S), H), x.dtype),
            num_prompt=n,
            num_quantized=n,
        )

    def append(self, stored: ChunkState, x: Array, at: Array) -> ChunkState:
        """Quantizes a chunk that is full, then stores x [B K 0|1 H] exactly, in slot at i32[B 1]."""
        is_due = self.is_due(stored, at)
        if self.num_chunks(self.num_slots(stored)):
            coded = compute_if(is_due.any(), self.encode_chunk, self.recent_chunk(stored))
            stored = self.append_chunk(stored, coded, is_due)
        return self.append_recent(stored, x, at)

    def num_chunks(self, slots: int) -> int:
        """Chunks of decoded tokens that can be codes at once in a cache of `slots`."""
        if slots == self.ring_slots > 0:
            # Codes are read in all slots but those of `every` exact tokens. The oldest chunk may be there in part.
            return -(-slots // self.every) - 1
        return slots // self.every if self.every else 0

    def is_due(self, stored: ChunkState, at: Array) -> Array:
        """bool[B]: whether a sequence's exact tokens fill a chunk before the next token goes to slot at i32[B 1]."""
        if not self.every:
            raise KvjaxError(f"{self} holds a prompt and nothing after it; use every=1 or more to hold what is decoded")
        return self._next_token(stored, at)[:, 0] - stored.num_quantized >= self.every

    def recent_chunk(self, stored: ChunkState) -> Array:
        """The exact tokens of a full chunk, in order: [B K every H]."""
        # `recent` is a ring: a chunk begins where the last one ended, which need not be index 0 after a prompt.
        order = (stored.num_quantized[:, None] + jnp.arange(self.every, dtype=jnp.int32)[None]) % self.every
        return memory.take(stored.recent, order[:, None])

    def next_chunk_slot(self, stored: ChunkState) -> Array:
        """i32[B 1]: the slot of the first token that is not a code yet."""
        at = stored.num_quantized[:, None]
        return at % self.ring_slots if self.is_ring(stored) else at

    def chunk_index(self, stored: ChunkState, slot: Array) -> Array:
        """The chunk of slots i32[B ...]: 0 for the first one after the prompt, negative for the prompt's slots.

        In a ring it is counted modulo `num_chunks`.
        """
        token = self._token_in(stored, slot)
        chunk = (token - _add_axes(stored.num_prompt, slot.ndim)) // max(self.every, 1)
        if not self.is_ring(stored):
            return chunk
        return jnp.where(chunk < 0, chunk, chunk % self.num_chunks(self.ring_slots))

    def append_chunk(self, stored: ChunkState, coded: ChunkCodes, is_due: Array) -> ChunkState:
        """Appends a chunk to the codes of the sequences that are due, bool[B]."""
        own, shared = stored.own, stored.shared
        if own is not None and coded.own is not None:
            own = self.append_tokens(stored, own, coded.own, is_due)
        if shared is not None and coded.shared is not None:
            chunk = 1 + self.chunk_index(stored, self.next_chunk_slot(stored))  # entry 0 is the prompt's
            shared = memory.append(shared, coded.shared, chunk, is_due)
        return dataclasses.replace(
            stored,
            codes=self.append_tokens(stored, stored.codes, self._pack(coded.codes), is_due),
            own=own,
            shared=shared,
            num_quantized=jnp.where(is_due, stored.num_quantized + self.every, stored.num_quantized),
        )

    def append_recent(self, stored: ChunkState, x: Array, at: Array) -> ChunkState:
        """Stores x [B K 0|1 H] exactly, in slot at i32[B 1]."""
        place = self._next_token(stored, at) % stored.recent.shape[2]
        return dataclasses.replace(stored, recent=memory.put(stored.recent, x, place))

    def decode(self, stored: ChunkState) -> Array:
        S = self.num_slots(stored)
        slot = jnp.arange(S, dtype=jnp.int32)[None, None]
        slot = jnp.broadcast_to(slot, (*stored.codes.data.shape[:2], S))
        x = self._restore_slots(stored, slot, None)
        if not stored.recent.shape[2]:
            return x
        if self.is_ring(stored) and S % self.every:
            recent = memory.take(stored.recent, self._token_in(stored, slot[:, :1]) % self.every)
        else:
            # Slot i is at index i modulo P, in a ring where P divides its slots: repeating the exact tokens puts each
            # into its place without a gather.
            recent = jnp.tile(stored.recent, (1, 1, -(-S // stored.recent.shape[2]), 1))[:, :, :S]
        # A slot beyond the codes restores garbage from unwritten words, which `where` drops before anything reads it.
        return jnp.where(self.is_code(stored, slot)[..., None], x, recent)

    def decode_prompt(self, stored: ChunkState) -> Array:
        """Restores all slots [B K S H] of what `encode` has returned, while they are those of the prompt."""
        # After a prompt as long as a ring, `decode` takes the oldest slots for those of the next tokens.
        S = self.num_slots(stored)
        own = None if stored.own is None else memory.unpack(stored.own)[:, :, :S]
        shared = None if stored.shared is None else memory.unpack(stored.shared)[:, :, :1]
        return self._restore_words(stored, memory.unpack(stored.codes)[:, :, :S], own, shared)

    def gather(self, stored: ChunkState, idx: Array) -> Array:
        x = self._restore_slots(stored, idx, idx)
        if not stored.recent.shape[2]:
            return x
        recent = memory.take(stored.recent, self._token_in(stored, idx) % stored.recent.shape[2])
        return jnp.where(self.is_code(stored, idx)[..., None], x, recent)

    def _restore_slots(self, stored: ChunkState, slot: Array, idx: Array | None) -> Array:
        """Restores the tokens [B K n H] of slots i32[B K n] from their codes; idx as in `read_tokens`."""
        words = self.read_tokens(stored, stored.codes, idx)
        own = None if stored.own is None else self.read_tokens(stored, stored.own, idx)
        shared = stored.shared
        if shared is not None:
            shared = memory.gather_tokens(shared, jnp.maximum(1 + self.chunk_index(stored, slot), 0))
        return self._restore_words(stored, words, own, shared)

    def _restore_words(self, stored: ChunkState, words: Array, own: Array | None, shared: Array | None) -> Array:
        """`restore` of packed codes."""
        return self.restore(bit_packing.unpack(words, self.bits, 3)[..., : stored.recent.shape[3]], own, shared)

    def is_code(self, stored: ChunkState, slot: Array) -> Array:
        """bool[B ...]: whether the tokens in slots i32[B ...] are read as codes."""
        token = self._token_in(stored, slot)
        is_code = token < _add_axes(stored.num_quantized, slot.ndim)
        return is_code & (token >= 0) if self.is_ring(stored) else is_code

    # Buffers with an entry for each token: the codes, and what a codec stores next to them.

    def pack_tokens(self, x: Array) -> memory.Buffer:
        """Packs what each slot of a cache has, [B K S W]."""
        if x.shape[2] == self.ring_slots > 0:
            x = jnp.pad(x, [(0, 0), (0, 0), (0, self.every - 1), (0, 0)])
        return memory.pack(x)

    def append_tokens(self, stored: ChunkState, buffer: memory.Buffer, x: Array, is_due: Array) -> memory.Buffer:
        """Writes what each token of the next chunk has, [B K every W], for the sequences that are due, bool[B]."""
        return memory.append(buffer, x, self.next_chunk_slot(stored), is_due)

    def read_tokens(self, stored: ChunkState, buffer: memory.Buffer, idx: Array | None) -> Array:
        """Reads what slots idx i32[B K n] have, [B K n W]; None for all, in order."""
        if idx is not None:
            return memory.gather_tokens(buffer, self._entry_of(stored, idx))
        x, S = memory.unpack(buffer), self.num_slots(stored)
        overhang = x.shape[2] - S
        if not overhang:
            return x
        # The first slots are the only ones with two entries, so that choosing one takes no gather.
        is_beyond = self._entry_of(stored, jnp.arange(overhang, dtype=jnp.int32)[None, None]) >= S
        first = jnp.where(is_beyond[..., None], x[:, :, S:], x[:, :, :overhang])
        return jnp.concatenate([first, x[:, :, overhang:S]], 2)

    def num_slots(self, stored: ChunkState) -> int:
        """Slots of the cache."""
        return self.ring_slots if self.is_ring(stored) else stored.codes.data.shape[2]

    # Tokens are counted from 0, and slots hold them in this order. Only in a ring are the two different numbers.

    def is_ring(self, stored: ChunkState) -> bool:
        """Whether slots of the cache are written over."""
        return 0 < self.ring_slots <= stored.codes.data.shape[2]

    def _next_token(self, stored: ChunkState, at: Array) -> Array:
        """Returns the number of the next token, which goes to slot at i32[B 1]."""
        if not self.is_ring(stored):
            return at
        return ring_order.first_token(at, stored.num_quantized[:, None], self.ring_slots)

    def _token_in(self, stored: ChunkState, slot: Array) -> Array:
        """Returns the numbers of the tokens in slots i32[B ...]; in a ring negative in empty ones."""
        if not self.is_ring(stored):
            return slot
        # The last token that may be exact is `every` behind the first.
        return ring_order.last_token(slot, _add_axes(stored.num_quantized, slot.ndim) + self.every, self.ring_slots)

    def _entry_of(self, stored: ChunkState, slot: Array) -> Array:
        """Returns the entries that slots i32[B ...] have in a buffer of `pack_tokens`."""
        if not self.is_ring(stored):
            return slot
        index = self._token_in(stored, slot) - _add_axes(stored.num_prompt, slot.ndim)  # negative in the prompt
        is_beyond = (index >= 0) & (index % self.every > slot)  # its chunk begins before the first slot
        return jnp.where(is_beyond, slot + self.ring_slots, slot)

    def _pack(self, codes: Array) -> Array:
        padding = -codes.shape[3] % bit_packing.codes_in_whole_words(self.bits)
        padded = jnp.pad(codes, [(0, 0), (0, 0), (0, 0), (0, padding)])
        return bit_packing.pack(padded, self.bits, 3)


@dataclasses.dataclass(frozen=True)
class Channelwise(ChunkCodec):
    """Quantizes each channel of a head between its minimum and maximum in the chunk (ZipCache's keys, 2405.14256).

    It stores two numbers per channel and chunk, and none per token. A constant channel is restored exactly.
    """

    def quantize(self, x: Array) -> ChunkCodes:
        # The whole chunk is one group of each channel: `quantize` takes groups along the last axis.
        codes, scale, lo = bit_packing.quantize(x.swapaxes(2, 3), self.bits)  # scale and lo [B K H 1]
        return ChunkCodes(codes.swapaxes(2, 3), None, jnp.concatenate([scale, lo], 2).swapaxes(2, 3))

    def restore(self, codes: Array, own: Array | None, shared: Array) -> Array:
        scale, lo = jnp.split(shared, 2, -1)
        return bit_packing.dequantize(codes, scale, lo)


@dataclasses.dataclass(frozen=True)
class Tokenwise(ChunkCodec):
    """Quantizes each token vector between its own minimum and maximum (KCVT's values, in GEAR, 2403.05527; MiKV).

    It stores two numbers per group of channels.

    Args:
      group: neighboring channels that are quantized together; 0 for all of a head's.
    """

    group: NonNegativeInt = 0

    def quantize(self, x: Array) -> ChunkCodes:
        codes, scale, lo = bit_packing.quantize(self._split(x), self.bits)
        return ChunkCodes(codes.reshape(x.shape), jnp.concatenate([scale[..., 0], lo[..., 0]], -1), None)

    def restore(self, codes: Array, own: Array, shared: None) -> Array:
        scale, lo = jnp.split(own[..., None], 2, 3)
        return bit_packing.dequantize(self._split(codes), scale, lo).reshape(codes.shape)

    def _split(self, x: Array) -> Array:
        """[B K T H] -> [B K T H/group group]."""
        H = x.shape[3]
        group = self.group or H
        bit_packing.check_divides("group", group, H)
        return x.reshape(*x.shape[:3], H // group, group)


@dataclasses.dataclass(frozen=True)
class SeparableTokenwise(ChunkCodec):
    """Channel-separable tokenwise quantization (ZipCache, He et al. 2024, arXiv 2405.14256, its values).

    Each channel is divided by the square root of its largest absolute value in the chunk; then each token vector is
    quantized between its own minimum and maximum; restoring multiplies again. It stores two numbers per token and one
    per channel. A channel of zeros is not divided and is restored as zeros (the public code divides by it).
    """

    def quantize(self, x: Array) -> ChunkCodes:
        largest = jnp.abs(x.astype(jnp.float32)).max(2, keepdims=True)
        root = jnp.sqrt(largest).astype(x.dtype)
        codes, scale, lo = bit_packing.quantize(x / jnp.where(root > 0, root, jnp.ones((), x.dtype)), self.bits)
        return ChunkCodes(codes, jnp.concatenate([scale, lo], -1), root)

    def restore(self, codes: Array, own: Array, shared: Array) -> Array:
        scale, lo = own[..., :1], own[..., 1:]
        return bit_packing.dequantize(codes, scale, lo) * shared
