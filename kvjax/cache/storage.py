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

    A codec that codes tokens together, or later than they come, sets `sequential_writes`: its tokens then arrive one by
    one and in order, none is evicted, and the layer asks `num_committed` how many may be taken back. Two more abilities
    are classes to derive from: `ObservingCodec` reads a prompt's queries, `HostLayout` stores otherwise on the host.
    """

    # Whether a token's stored numbers depend on tokens after it, as in groups: what a query reads then depends on when
    # it comes, so that `append` takes at most one token per call.
    sequential_writes = False
    pre_rope = False  # whether it stores keys before their rotation by RoPE
    is_smooth = False  # whether `decode` is a differentiable function of what was encoded

    @property
    def supports_eviction(self) -> bool:
        """Whether each head can overwrite any slot; otherwise all heads write the same one, after the last token."""
        return not self.sequential_writes

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

    def scores(self, q: Float[Array, "B K G T H"], stored: Any) -> Float32[Array, "B K G T S"]:
        """Scaled dot products of queries and all keys; `stored` in device memory."""
        return attention.scores(q, self.decode(stored))

    def mix(self, p: Float32[Array, "B K G T S"], stored: Any) -> Float32[Array, "B K G T Hv"]:
        """Sums all values by weights; `stored` in device memory."""
        return attention.mix(p, self.decode(stored))

    def num_committed(self, stored: Any, n: Int32[Array, " B"]) -> Int32[Array, " B"]:
        """The number of the first n tokens that cannot be rolled back, because they share stored numbers."""
        return n if self.sequential_writes else jnp.zeros_like(n)

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
          tokens: of each key/value head, that `gather` takes; None: all slots, as `scores` and `mix` read them.
        """
        return StepBytes.of_all(stored) if tokens is None else StepBytes.of_tokens(stored, tokens)

    def in_pages(self, page: int) -> Codec | None:
        """The codec that stores immutable pages of `page` slots, each of any head; None if this one cannot.

        Only `encode` and `decode` are called on it, with [B K S H] in whole pages that are filled from the front. Its
        arrays have one entry per slot in axis 2; those with one entry per page stand in a `PagedArrays`.

        Raises:
          IncompatibleMethod: for a page size that does not suit the codec.
        """
        return self if self.supports_eviction else None

    def on_device(self) -> Codec:
        """The same codec without host placement."""
        return self


class ObservingCodec(Codec):
    """A codec that observes the last queries of a prompt, such as one that keeps the channels that they need."""

    num_queries: int | None = 0  # last prompt queries of each sequence that `encode` observes, as in `Needs`

    @abstract
    def encode(
        self, x: Float[Array, "B K S H"], pos: Int32[Array, "B #K S"], observation: Observation | None = None
    ) -> Any:
        """As `Codec.encode`, with the queries of the prompt whose tokens x are; None where there are none to see."""
        ...


def encode_prompt(codec: Codec, x: Array, pos: Array, observation: Observation | None) -> Any:
    """Stores what a prompt leaves, with its queries where the codec observes them."""
    return codec.encode(x, pos, observation) if isinstance(codec, ObservingCodec) else codec.encode(x, pos)


def observed_queries(codec: Codec) -> int | None:
    """The number of the prompt's last queries that a codec observes, as in `Needs`."""
    return codec.num_queries if isinstance(codec, ObservingCodec) else 0


class HostLayout:
    """The ability of a codec that stores its arrays in another layout on the host, where single tokens are gathered."""

    @abstract
    def on_host(self) -> Codec:
        """The same codec in that layout; `Codec.on_device` returns to the other one."""
        ...


class ReadsKeys:
    """Marks a codec of values that stores nothing, and reads them off the stored keys (`codecs.shared_values`)."""


class PagedArrays:
    """Marks a pytree of arrays [B K P ...] whose axis 2 counts pages, not slots."""


class CacheIndex(Protocol):
    """Counts positions inside the cache: a policy, or the order of the slots."""

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
      indexed_by: None where tokens stand at their true positions in the text; else that whose `cache_positions` count
        a token's index among the tokens that are still cached (StreamingLLM).
    """

    spec: LayerSpec
    k: Codec
    v: Codec
    indexed_by: CacheIndex | None = None

    def keys_to_store(self, block: KVBlock) -> Float[Array, "B K S H"]:
        """The keys as the codec gets them: without rotation if it asks so, or if positions are indices in the cache."""
        # The decoder hands over rotated keys, as scorers and most codecs want them; the few others turn them back.
        if self.indexed_by is None and not self.k.pre_rope:
            return block.k
        return self.spec.rope.unrotate(block.k, block.pos).astype(block.k.dtype)

    @property
    def shares_values(self) -> bool:
        """Whether values are channels of the keys, and stored once for both."""
        return isinstance(self.v, ReadsKeys)

    def encode(self, block: KVBlock, observation: Observation | None = None) -> tuple[Any, Any]:
        """Encodes the tokens that a prompt leaves: the stored keys, and the stored values."""
        k = encode_prompt(self.k, self.keys_to_store(block), block.pos, observation)
        return k, encode_prompt(self.v, block.v, block.pos, observation)

    def append(self, k: Any, v: Any, new: KVBlock, slot: Int32[Array, "B #K"]) -> tuple[Any, Any]:
        """Writes new tokens into stored keys and values, from `slot` on."""
        return self.k.append(k, self.keys_to_store(new), slot), self.v.append(v, new.v, slot)

    def open_values(self, state: LayerState) -> LayerState:
        """Returns the state as readers take it: where values are channels of the keys, `v` is what `k` stores."""
        return dataclasses.replace(state, v=state.k) if self.shares_values else state

    def load(self, state: LayerState) -> tuple[Any, Any]:
        """Copies stored keys and values to device memory, once where they are the same."""
        keys = memory.load(state.k)
        return keys, keys if self.shares_values else memory.load(state.v)

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
        values = self.spec.values_of(keys) if self.shares_values else self.v.gather(state.v, idx)
        return self._rotate(keys, pos), values

    def _rotate(self, k: Array, pos: Array) -> Array:
        return self.spec.rope.rotate(k, pos).astype(k.dtype) if self.k.pre_rope else k

    def decode(self, k: Any, v: Any, pos: Int32[Array, "B #K S"]) -> KVBlock:
        """Decodes all stored keys, rotated to their true positions, and values."""
        return KVBlock(self.decode_keys(k, pos), self.v.decode(k if self.shares_values else v), pos)

    def in_pages(self, page: int) -> KVStorage:
        """The storage of immutable pages of `page` slots; of codecs whose `in_pages` is not None."""
        k, v = self.k.in_pages(page), self.v.in_pages(page)
        assert k is not None and v is not None  # as a store of pages checks
        return dataclasses.replace(self, k=k, v=v)
