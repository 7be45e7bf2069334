"""Codes that are made once: for the prompt as a whole, then for each full chunk of what is decoded."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kvjax.cache.codecs import bit_packing as quant
from kvjax.cache.codecs.base import Codec
from kvjax.core import memory
from kvjax.core.gradients import refuse_gradient
from kvjax.core.types import Array, exportable, pytree
from kvjax.errors import KvjaxError


@exportable
class Coded(NamedTuple):
    """Tokens as codes, and what restores them."""

    codes: Array  # uint32[B K T H]
    own: Array | None  # [B K T A], what each token has for itself
    shared: Array | None  # [B K 1 C], what all of them share


@pytree
class Chunks:
    """Slots 0..settled-1 as codes; the others, the newest, as they came, slot i at place i modulo P."""

    codes: memory.Buffer  # uint32 words [B K S W], packed along channels
    own: memory.Buffer | None  # [B K S A]
    shared: memory.Buffer | None  # [B K U C], of the prompt, then of each chunk
    recent: Array  # [B K P H]
    prompt: Array  # i32[B], slots of the prompt
    num_quantized: Array  # i32[B]

    @property
    def slots(self) -> int:
        """Slots of the cache."""
        return self.codes.data.shape[2]


@dataclasses.dataclass(frozen=True)
class ChunkCodec(Codec):
    """The base of codecs whose tokens share something: `quantize` and `restore` make one.

    bits: 1, 2, 3, 4 or 8. every: decoded tokens stay in full precision until so many have come; these become codes at
    the start of the next step, and share what they share with each other only. 0: a prompt is held, and nothing after
    it. Codes are made once, from real tokens of their own row and head. Words are padded where channels do not fill
    them.
    """

    bits: int = 4
    every: int = 0

    sequential_writes = True  # what a query sees in low bits depends on its own time
    supports_eviction = False  # tokens share a scale, and none of them can leave it

    def __post_init__(self):
        quant.check_bits(self.bits, quant.ROW_BITS)
        if self.every < 0:
            raise KvjaxError(f"every must be 0 or more decoded tokens, got {self.every}; ZipCache uses 100")

    def quantize(self, x: Array) -> Coded:
        """Tokens x [B K T H], all of them real, as codes."""
        raise NotImplementedError

    def coded(self, x: Array) -> Coded:
        """`quantize`, through which no gradient passes."""
        return self.quantize(refuse_gradient(x, f"codes of {type(self).__name__}"))

    def restore(self, codes: Array, own: Array | None, shared: Array | None) -> Array:
        """Codes uint32[B K n H], each with its own part [B K n A] and its shared one [B K 1|n C] -> [B K n H]."""
        raise NotImplementedError

    def num_committed(self, stored: Chunks, n: Array) -> Array:
        return stored.num_quantized

    def encode(self, x: Array, pos: Array) -> Chunks:
        B, K, S, H = x.shape
        real = jnp.broadcast_to(pos >= 0, (B, K, S))[..., None]
        x = jnp.where(real, x, jnp.zeros((), x.dtype))
        # Empty slots repeat the first token: that changes no minimum and no maximum.
        coded = self.coded(jnp.where(real, x, x[:, :, :1]))
        own = None if coded.own is None else memory.pack(jnp.where(real, coded.own, jnp.zeros((), x.dtype)))
        more = [(0, 0), (0, 0), (0, self.chunks(S)), (0, 0)]
        n = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        return Chunks(
            memory.pack(self._words(jnp.where(real, coded.codes, 0))),
            own,
            None if coded.shared is None else memory.pack(jnp.pad(coded.shared, more)),
            jnp.zeros((B, K, min(self.every, S), H), x.dtype),
            n,
            n,
        )

    def append(self, stored: Chunks, x: Array, at: Array) -> Chunks:
        """Makes codes of a chunk that is full, then holds x [B K 0|1 H] at slot at i32[B 1] in full precision."""
        due = self.due(stored, at)
        if self.chunks(stored.slots):

            def settled(stored: Chunks) -> Chunks:
                return self.settle(stored, self.coded(self.full(stored)), due)

            stored = lax.cond(due.any(), settled, lambda s: s, stored)
        return self.keep(stored, x, at)

    def chunks(self, slots: int) -> int:
        """How many chunks can become full in so many slots."""
        return slots // self.every if self.every else 0

    def due(self, stored: Chunks, at: Array) -> Array:
        """bool[B]: the rows whose recent tokens fill a chunk, when the next one goes to slot at i32[B 1]."""
        if not self.every:
            raise KvjaxError(f"{self} holds a prompt and nothing after it; use every=1 or more to hold what is decoded")
        return at[:, 0] - stored.num_quantized >= self.every

    def full(self, stored: Chunks) -> Array:
        """The tokens of a full chunk as they came, in order: [B K every H]."""
        order = (stored.num_quantized[:, None] + jnp.arange(self.every, dtype=jnp.int32)[None]) % self.every
        return memory.take(stored.recent, order[:, None])

    def chunk_of(self, stored: Chunks, slot: Array) -> Array:
        """The chunk of slots i32[B ...] behind the prompt: 0 for the first one; of the prompt's below 0."""
        return (slot - stored.prompt.reshape(-1, *(1,) * (slot.ndim - 1))) // max(self.every, 1)

    def settle(self, stored: Chunks, coded: Coded, due: Array) -> Chunks:
        """The chunk `coded` behind the codes of the rows that are due bool[B]."""
        at, own, shared = stored.num_quantized[:, None], stored.own, stored.shared
        chunk = 1 + self.chunk_of(stored, at)
        return dataclasses.replace(
            stored,
            codes=memory.append(stored.codes, self._words(coded.codes), at, due),
            own=None if own is None or coded.own is None else memory.append(own, coded.own, at, due),
            shared=None if shared is None or coded.shared is None else memory.append(shared, coded.shared, chunk, due),
            num_quantized=jnp.where(due, stored.num_quantized + self.every, stored.num_quantized),
        )

    def keep(self, stored: Chunks, x: Array, at: Array) -> Chunks:
        """With x [B K 0|1 H] at slot at i32[B 1], as it came."""
        place = at % stored.recent.shape[2]
        return dataclasses.replace(stored, recent=memory.put(stored.recent, x, place))

    def decode(self, stored: Chunks) -> Array:
        """[B K S H] in the dtype that came in."""
        B, K, S, _ = stored.codes.data.shape
        slot = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[None, None], (B, K, S))
        own = None if stored.own is None else memory.unpack(stored.own)
        return self._rows(stored, slot, memory.unpack(stored.codes), own)

    def gather(self, stored: Chunks, idx: Array) -> Array:
        own = None if stored.own is None else memory.gather_tokens(stored.own, idx)
        return self._rows(stored, idx, memory.gather_tokens(stored.codes, idx), own)

    def _rows(self, stored: Chunks, slot: Array, words: Array, own: Array | None) -> Array:
        """The tokens in slots i32[B K n], of which the words and their own parts are given."""
        settled, shared = stored.num_quantized[:, None, None], stored.shared
        if shared is not None:
            shared = memory.gather_tokens(shared, jnp.maximum(1 + self.chunk_of(stored, slot), 0))
        codes = quant.unpack(words, self.bits, 3)[..., : stored.recent.shape[3]]
        held = self.restore(codes, own, shared)
        places = stored.recent.shape[2]
        if not places:
            return held
        return jnp.where((slot < settled)[..., None], held, memory.take(stored.recent, slot % places))

    def _words(self, codes: Array) -> Array:
        fill = -codes.shape[3] % quant.fill(self.bits)
        return quant.pack(jnp.pad(codes, [(0, 0), (0, 0), (0, 0), (0, fill)]), self.bits, 3)
