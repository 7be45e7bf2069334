"""How keys and values are stored: the base of the components `k` and `v`, and what readers know of both.

`Codec` is all that the author of a codec needs. `KVStorage` puts the codecs of keys and values together in one layer;
readers and side stores get it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from kvjax.cache.protocol import LayerSpec, LayerState
from kvjax.core import attention, memory
from kvjax.core.attention_mass import Observation
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import Array, KVBlock
from kvjax.utils.abstract import abstract


class Codec:
    """Stores the keys or the values [B K S H] of one layer.

    A codec is a frozen dataclass that defines `encode`, `decode`, `append` and `gather`. The other members have
    defaults that follow from these four; a codec overrides one where it can be faster or cheaper. Empty slots (pos < 0)
    may hold anything when a codec gets them, so they must not influence what it stores, such as a quantization scale.

    Each array that grows with the slots is four-dimensional, [B K S W] with W = 1 for a number per token, and
    `memory.pack` makes a `memory.Buffer` of it; `memory.append`, `memory.gather_tokens` and `memory.unpack` take that
    buffer. `cache.codecs.plain` has the shortest codec; one with several arrays keeps their buffers in a pytree, such
    as a NamedTuple under `exportable`, and calls these functions on each.
    """

    sequential_writes = False  # whether `append` takes at most one token per call
    supports_eviction = True  # whether any slot can be overwritten; otherwise tokens are only appended after the last
    pre_rope = False  # whether it stores keys before their rotation by RoPE
    is_smooth = False  # whether `decode` is a differentiable function of what was encoded
    scores_in_place = False  # whether `score_in_place` leaves keys of host memory there
    reads_keys = False  # whether it stores nothing, and reads values off the stored keys (`SharedValues`)
    is_head_specific = False  # whether each head is stored differently, so that a page cannot move between heads
    num_queries: int | None = 0  # last prompt queries of each sequence that `encode_prompt` observes, as in `Needs`

    def encode_prompt(
        self, x: Float[Array, "B K S H"], pos: Int32[Array, "B #K S"], observation: Observation | None
    ) -> Any:
        """`encode` for the tokens that a prompt leaves; override it in a codec that observes the prompt's queries."""
        return self.encode(x, pos)

    @abstract
    def encode(self, x: Float[Array, "B K S H"], pos: Int32[Array, "B #K S"]) -> Any:
        """Stores all slots of a cache.

        Args:
          x: keys or values; arbitrary in empty slots.
          pos: positions, -1 in empty slots.

        Returns:
          The stored form: any pytree. `memory.Buffer`s within it can be placed in host memory.
        """
        ...

    @abstract
    def decode(self, stored: Any) -> Float[Array, "B K S H"]:
        """Restores all slots, in device memory, in the dtype that `encode` got.

        No other argument tells that dtype: store one array in it, such as the scales, or keep to the dtype of a buffer.
        """
        ...

    @abstract
    def append(self, stored: Any, x: Float[Array, "B K T H"], at: Int32[Array, "B #K"]) -> Any:
        """Writes x from slot `at` on; `at` differs between heads only where `supports_eviction`.

        T may be 0. Padding tokens come along, behind a sequence's own; what they leave lies in slots that are empty.
        """
        ...

    @abstract
    def gather(self, stored: Any, idx: Int32[Array, "B K n"]) -> Float[Array, "B K n H"]:
        """Restores some slots, in device memory; only these cross from the host."""
        ...

    def load(self, stored: Any) -> Any:
        """Copies the stored form to device memory, for `scores` and `mix`."""
        return stored

    def scores(self, q: Float[Array, "B K G T H"], stored: Any) -> Float32[Array, "B K G T S"]:
        """Scaled dot products of queries and all keys; `stored` in device memory."""
        return attention.scores(q, self.decode(stored))

    def score_in_place(self, q: Float[Array, "B K G T H"], stored: Any) -> Float32[Array, "B K G T S"]:
        """`scores`, computed in the memory where the keys are, if the codec can do so."""
        return self.scores(q, self.load(memory.map_buffers(memory.to_device, stored)))

    def mix(self, p: Float32[Array, "B K G T S"], stored: Any) -> Float32[Array, "B K G T Hv"]:
        """Sums all values by weights; `stored` in device memory."""
        return attention.mix(p, self.decode(stored))

    def num_quantized(self, n: Int32[Array, " B"]) -> Int32[Array, " B"]:
        """The number of the first n tokens of each sequence that are inexact when the next token is read.

        It is for readers that hold the same tokens exactly elsewhere (SpeCache); without one the default will do.
        """
        return jnp.zeros_like(n)

    def num_committed(self, stored: Any, n: Int32[Array, " B"]) -> Int32[Array, " B"]:
        """The number of the first n tokens that cannot be rolled back, because they share stored numbers."""
        return jnp.zeros_like(n) if self.supports_eviction else n

    def used_part(self, stored: Any, num_tokens: int) -> Any:
        """The arrays, or parts of them, that a cache with `num_tokens` slots would have; its bytes are reported.

        Override it in a codec with arrays whose size does not follow from the slots, such as a recent window.
        """
        return stored

    def read_bytes(self, stored: Any, tokens: int | None = None) -> StepBytes:
        """Counts the bytes of the stored form that a decode step reads; only shapes and memory kinds are looked at.

        The default is right where each token has one entry in every buffer, and `gather` reads these alone. Override it
        in a codec whose `gather` reads more, or less.

        Args:
          stored: the stored form, of abstract values.
          tokens: of each key/value head, that `gather` takes; None: all slots, as `load`, `scores` and `mix` read them.
        """
        return StepBytes.of_all(stored) if tokens is None else StepBytes.of_tokens(stored, tokens)

    def in_window(self, by_token: Codec) -> Codec:
        """The codec of a layer with a sliding window, whose slots are overwritten one by one, by all heads at once.

        It is this one where each token is stored by itself, and `by_token` where tokens are coded together.
        """
        return self if self.supports_eviction else by_token

    def in_pages(self, page: int) -> Codec | None:
        """The codec that stores immutable pages of `page` slots, each of one head; None if this one cannot.

        Only `encode` and `decode` are called on it, with [B K S H] in whole pages that are filled from the front. Its
        arrays have one entry per slot in axis 2; those with one entry per page stand in a `PagedArrays`.

        Raises:
          IncompatibleMethod: for a page size that does not suit the codec.
        """
        return self if self.supports_eviction else None

    def on_device(self) -> Codec:
        """The same codec without host placement."""
        return self

    def on_host(self) -> Codec:
        """The same codec in the layout that suits gathering single tokens from host memory."""
        return self


class PagedArrays:
    """Marks a pytree of arrays [B K P ...] whose axis 2 counts pages, not slots."""


class CacheIndex(Protocol):
    """A policy that counts positions inside the cache."""

    def cache_positions(self, held: Int32[Array, "B #K S"], pos: Int32[Array, "B #K T"]) -> Int32[Array, "B #K T"]:
        """Counts positions inside the cache: of tokens at `pos`, among the held tokens."""
        ...


@dataclasses.dataclass(frozen=True)
class KVStorage:
    """The storage of keys and values in one layer: all that readers and side stores know of a method.

    Attributes:
      spec: the layer, without its index.
      k: codec of the keys.
      v: codec of the values.
      indexed_by: None where tokens stand at their true positions in the text; else the policy whose `cache_positions`
        count a token's index among the tokens that are still cached (StreamingLLM).
    """

    spec: LayerSpec
    k: Codec
    v: Codec
    indexed_by: CacheIndex | None = None

    def keys_to_store(self, block: KVBlock) -> Float[Array, "B K S H"]:
        """The keys as the codec gets them: without rotation if it asks so, or if positions are indices in the cache."""
        if self.indexed_by is None and not self.k.pre_rope:
            return block.k
        return self.spec.rope.unrotate(block.k, block.pos).astype(block.k.dtype)

    def encode_prompt(self, block: KVBlock, observation: Observation | None) -> tuple[Any, Any]:
        """Encodes the tokens that a prompt leaves: the stored keys, and the stored values."""
        k = self.k.encode_prompt(self.keys_to_store(block), block.pos, observation)
        return k, self.v.encode_prompt(block.v, block.pos, observation)

    def encode(self, block: KVBlock) -> tuple[Any, Any]:
        """Encodes other tokens, without a prompt's queries: the stored keys, and the stored values."""
        return self.k.encode(self.keys_to_store(block), block.pos), self.v.encode(block.v, block.pos)

    def append(self, k: Any, v: Any, new: KVBlock, slot: Int32[Array, "B #K"]) -> tuple[Any, Any]:
        """Writes new tokens into stored keys and values, from `slot` on."""
        return self.k.append(k, self.keys_to_store(new), slot), self.v.append(v, new.v, slot)

    def open_values(self, state: LayerState) -> LayerState:
        """Returns the state as readers take it: where values are channels of the keys, `v` is what `k` stores."""
        return dataclasses.replace(state, v=state.k) if self.v.reads_keys else state

    def load(self, state: LayerState) -> tuple[Any, Any]:
        """Copies stored keys and values to device memory, once where they are the same."""
        keys = self.k.load(state.k)
        return keys, keys if self.v.reads_keys else self.v.load(state.v)

    def read_bytes(self, state: LayerState, tokens: int | None = None) -> StepBytes:
        """Bytes of the stored keys and values that a step reads; `tokens` as in `Codec.read_bytes`."""
        return self.k.read_bytes(state.k, tokens) + self.v.read_bytes(state.v, tokens)

    def decode_keys(self, stored: Any, pos: Int32[Array, "B #K S"]) -> Float[Array, "B K S H"]:
        """Decodes all keys, rotated to their true positions `pos`."""
        return self._rotate(self.k.decode(stored), pos)

    def gather_keys(
        self, stored: Any, idx: Int32[Array, "B K n"], pos: Int32[Array, "B #K n"]
    ) -> Float[Array, "B K n H"]:
        """Decodes the keys in some slots, rotated to their true positions `pos`."""
        return self._rotate(self.k.gather(stored, idx), pos)

    def gather(
        self, state: LayerState, idx: Int32[Array, "B K n"], pos: Int32[Array, "B #K n"]
    ) -> tuple[Float[Array, "B K n H"], Float[Array, "B K n Hv"]]:
        """Decodes keys, rotated to their true positions `pos`, and values in some slots."""
        keys = self.k.gather(state.k, idx)
        values = self.spec.values_of(keys) if self.v.reads_keys else self.v.gather(state.v, idx)
        return self._rotate(keys, pos), values

    def _rotate(self, k: Array, pos: Array) -> Array:
        return self.spec.rope.rotate(k, pos).astype(k.dtype) if self.k.pre_rope else k

    def decode(self, k: Any, v: Any, pos: Int32[Array, "B #K S"]) -> KVBlock:
        """Decodes all stored keys, rotated to their true positions, and values."""
        return KVBlock(self.decode_keys(k, pos), self.v.decode(k if self.v.reads_keys else v), pos)

    def in_pages(self, page: int) -> KVStorage:
        """The storage of immutable pages of `page` slots; of codecs whose `in_pages` is not None."""
        k, v = self.k.in_pages(page), self.v.in_pages(page)
        assert k is not None and v is not None  # as a store of pages checks
        return dataclasses.replace(self, k=k, v=v)
