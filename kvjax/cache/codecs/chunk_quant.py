"""Codecs that quantize a prompt as a whole, and then every full chunk of decoded tokens, per channel or per token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.codecs import bit_packing
from kvjax.cache.storage import Codec
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
    """Slots 0..num_quantized-1 as codes; the newest tokens are exact, slot i at index i modulo P of `recent`."""

    codes: memory.Buffer  # uint32 words [B K S W], packed along channels
    own: memory.Buffer | None  # [B K S A]
    shared: memory.Buffer | None  # [B K U C], of the prompt, then of each chunk
    recent: Array  # [B K P H]
    num_prompt: Array  # i32[B]
    num_quantized: Array  # i32[B]

    @property
    def slots(self) -> int:
        """Slots of the cache."""
        return self.codes.data.shape[2]


@dataclasses.dataclass(frozen=True)
class ChunkCodec(Codec):
    """The base of codecs that quantize chunks; a subclass defines `quantize` and `restore`.

    Decoded tokens stay exact until there are `every` of them. At the start of the next step these become codes, and
    share numbers with each other only. Codes are made once, from real tokens of one sequence and head.

    Args:
      bits: 1, 2, 3, 4 or 8. Words are padded where channels do not fill them.
      every: decoded tokens of a chunk; 0 for a codec that stores a prompt and nothing after it.
    """

    bits: bit_packing.RowBits = 4
    every: NonNegativeInt = 0

    sequential_writes = True  # the tokens of a chunk share numbers, and are exact until it is full

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

    def num_committed(self, stored: ChunkState, n: Array) -> Array:
        return stored.num_quantized

    def encode(self, x: Array, pos: Array) -> ChunkState:
        B, K, S, H = x.shape
        real = jnp.broadcast_to(pos >= 0, (B, K, S))[..., None]
        x = jnp.where(real, x, jnp.zeros((), x.dtype))
        # Empty slots repeat the first token, which changes no minimum and no maximum.
        coded = self.encode_chunk(jnp.where(real, x, x[:, :, :1]))
        own = None if coded.own is None else memory.pack(jnp.where(real, coded.own, jnp.zeros((), x.dtype)))
        padding = [(0, 0), (0, 0), (0, self.num_chunks(S)), (0, 0)]
        n = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        return ChunkState(
            memory.pack(self._pack(jnp.where(real, coded.codes, 0))),
            own,
            None if coded.shared is None else memory.pack(jnp.pad(coded.shared, padding)),
            # The whole prompt becomes codes, also its last partial chunk: ZipCache and MiKV keep nothing of it exact.
            jnp.zeros((B, K, min(self.every, S), H), x.dtype),
            num_prompt=n,
            num_quantized=n,
        )

    def append(self, stored: ChunkState, x: Array, at: Array) -> ChunkState:
        """Quantizes a chunk that is full, then stores x [B K 0|1 H] exactly, in slot at i32[B 1]."""
        # A full chunk leaves first: the new token takes the place of its oldest one.
        is_due = self.is_due(stored, at)
        if self.num_chunks(stored.slots):
            coded = compute_if(is_due.any(), self.encode_chunk, self.recent_chunk(stored))
            stored = self.append_chunk(stored, coded, is_due)
        return self.append_recent(stored, x, at)

    def num_chunks(self, slots: int) -> int:
        """Chunks of decoded tokens that can become full in a cache of `slots`."""
        return slots // self.every if self.every else 0

    def is_due(self, stored: ChunkState, at: Array) -> Array:
        """bool[B]: whether a sequence's exact tokens fill a chunk before the next token goes to slot at i32[B 1]."""
        if not self.every:
            raise KvjaxError(f"{self} holds a prompt and nothing after it; use every=1 or more to hold what is decoded")
        return at[:, 0] - stored.num_quantized >= self.every

    def recent_chunk(self, stored: ChunkState) -> Array:
        """The exact tokens of a full chunk, in order: [B K every H]."""
        # `recent` is a ring: a chunk begins where the last one ended, which need not be index 0 after a prompt.
        order = (stored.num_quantized[:, None] + jnp.arange(self.every, dtype=jnp.int32)[None]) % self.every
        return memory.take(stored.recent, order[:, None])

    def chunk_index(self, stored: ChunkState, slot: Array) -> Array:
        """The chunk of slots i32[B ...]: 0 for the first one after the prompt, negative for the prompt's slots."""
        return (slot - stored.num_prompt.reshape(-1, *(1,) * (slot.ndim - 1))) // max(self.every, 1)

    def append_chunk(self, stored: ChunkState, coded: ChunkCodes, is_due: Array) -> ChunkState:
        """Appends a chunk to the codes of the sequences that are due, bool[B]."""
        at, own, shared = stored.num_quantized[:, None], stored.own, stored.shared
        chunk = 1 + self.chunk_index(stored, at)  # entry 0 is the prompt's
        if own is not None and coded.own is not None:
            own = memory.append(own, coded.own, at, is_due)
        if shared is not None and coded.shared is not None:
            shared = memory.append(shared, coded.shared, chunk, is_due)
        return dataclasses.replace(
            stored,
            codes=memory.append(stored.codes, self._pack(coded.codes), at, is_due),
            own=own,
            shared=shared,
            num_quantized=jnp.where(is_due, stored.num_quantized + self.every, stored.num_quantized),
        )

    def append_recent(self, stored: ChunkState, x: Array, at: Array) -> ChunkState:
        """Stores x [B K 0|1 H] exactly, in slot at i32[B 1]."""
        return dataclasses.replace(stored, recent=memory.put(stored.recent, x, at % stored.recent.shape[2]))

    def decode(self, stored: ChunkState) -> Array:
        B, K, S, _ = stored.codes.data.shape
        slot = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[None, None], (B, K, S))
        own = None if stored.own is None else memory.unpack(stored.own)
        # Slot i is at index i modulo P, so that repeating the exact tokens puts each into its place without a gather.
        recent = jnp.tile(stored.recent, (1, 1, -(-S // max(stored.recent.shape[2], 1)), 1))[:, :, :S]
        return self._restore_slots(stored, slot, memory.unpack(stored.codes), own, recent)

    def gather(self, stored: ChunkState, idx: Array) -> Array:
        own = None if stored.own is None else memory.gather_tokens(stored.own, idx)
        places = max(stored.recent.shape[2], 1)
        recent = memory.take(stored.recent, idx % places) if self.every else stored.recent
        return self._restore_slots(stored, idx, memory.gather_tokens(stored.codes, idx), own, recent)

    def _restore_slots(self, stored: ChunkState, slot: Array, words: Array, own: Array | None, recent: Array) -> Array:
        """The tokens [B K n H] of slots i32[B K n], by their words, own numbers, and exact tokens of these slots."""
        shared = stored.shared
        if shared is not None:
            # Chunks of decoded tokens count from 0, and slots of the prompt are before them: all share entry 0.
            shared = memory.gather_tokens(shared, jnp.maximum(1 + self.chunk_index(stored, slot), 0))
        codes = bit_packing.unpack(words, self.bits, 3)[..., : stored.recent.shape[3]]
        x = self.restore(codes, own, shared)
        if not stored.recent.shape[2]:
            return x
        # A slot beyond the codes restores garbage from unwritten words, which `where` drops before anything reads it.
        is_quantized = slot < stored.num_quantized[:, None, None]
        return jnp.where(is_quantized[..., None], x, recent)

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
