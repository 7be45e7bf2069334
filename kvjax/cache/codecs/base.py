"""The components `k` and `v` of a method: how keys or values are stored, and in which memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.core import attention, memory
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array
from kvjax.errors import KvjaxError


class Codec:
    """Stores the keys or the values [B K S H] of one layer.

    A codec is a frozen dataclass that defines `encode`, `decode`, `append` and `gather`. The other members have
    defaults that follow from these four; a codec overrides one where it can be faster or cheaper. Empty slots (pos < 0)
    may hold anything when a codec gets them, so they must not influence what it stores, such as a quantization scale.
    """

    sequential_writes = False  # whether `append` takes at most one token per call
    supports_eviction = True  # whether any slot can be overwritten; otherwise tokens are only appended after the last
    pre_rope = False  # whether it stores keys before their rotation by RoPE
    is_smooth = False  # whether `decode` is a differentiable function of what was encoded
    is_head_specific = False  # whether each head is stored differently, so that a page cannot move between heads
    num_queries: int | None = 0  # last prompt queries of each sequence that `encode_prompt` observes, as in `Needs`

    def encode_prompt(self, x: Array, pos: Array, observation: Observation | None) -> Any:
        """`encode` for the tokens that a prompt leaves; override it in a codec that observes the prompt's queries."""
        return self.encode(x, pos)

    def encode(self, x: Array, pos: Array) -> Any:
        """Stores all slots of a cache.

        Args:
          x: [B K S H], keys or values; arbitrary in empty slots.
          pos: i32[B 1|K S], positions, -1 in empty slots.

        Returns:
          The stored form: any pytree. `memory.Buffer`s within it can be placed in host memory.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `encode`")

    def decode(self, stored: Any) -> Array:
        """Restores all slots: [B K S H] in device memory."""
        raise NotImplementedError(f"{type(self).__name__} has no method `decode`")

    def append(self, stored: Any, x: Array, at: Array) -> Any:
        """Writes x [B K T H] from slot at i32[B 1|K] on; `at` differs between heads only where `supports_eviction`."""
        raise NotImplementedError(f"{type(self).__name__} has no method `append`")

    def gather(self, stored: Any, idx: Array) -> Array:
        """Restores the slots idx i32[B K n]: [B K n H] in device memory; only these cross from the host."""
        raise NotImplementedError(f"{type(self).__name__} has no method `gather`")

    def load(self, stored: Any) -> Any:
        """Copies the stored form to device memory, for `scores` and `mix`."""
        return stored

    def scores(self, q: Array, stored: Any) -> Array:
        """Scaled dot products of q [B K G T H] and all keys, f32[B K G T S]; `stored` in device memory."""
        return attention.scores(q, self.decode(stored))

    def score_in_place(self, q: Array, stored: Any) -> Array:
        """`scores`, computed in the memory where the keys are, if the codec can do so."""
        return self.scores(q, self.load(memory.map_buffers(memory.to_device, stored)))

    def mix(self, p: Array, stored: Any) -> Array:
        """Sums all values by the weights p f32[B K G T S]: f32[B K G T H]; `stored` in device memory."""
        return attention.mix(p, self.decode(stored))

    def num_quantized(self, n: Array) -> Array:
        """i32[B]: how many of the first n i32[B] tokens of each sequence are inexact when the next token is read."""
        return jnp.zeros_like(n)

    def num_committed(self, stored: Any, n: Array) -> Array:
        """i32[B]: how many of the first n i32[B] tokens cannot be rolled back, because they share stored numbers."""
        return jnp.zeros_like(n) if self.supports_eviction else n

    def used_part(self, stored: Any, num_tokens: int) -> Any:
        """The arrays, or parts of them, that a cache with `num_tokens` slots would have; its bytes are reported.

        Override it in a codec with arrays whose size does not follow from the slots, such as a recent window.
        """
        return stored

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


@dataclasses.dataclass(frozen=True)
class Plain(Codec):
    """Stores keys or values exactly, in the model's dtype."""

    is_smooth = True

    def encode(self, x: Array, pos: Array) -> memory.Buffer:
        return memory.pack(x)

    def decode(self, stored: memory.Buffer) -> Array:
        return memory.unpack(stored)

    def append(self, stored: memory.Buffer, x: Array, at: Array) -> memory.Buffer:
        return memory.append(stored, x, at)

    def gather(self, stored: memory.Buffer, idx: Array) -> Array:
        return memory.gather_tokens(stored, idx)

    def score_in_place(self, q: Array, stored: memory.Buffer) -> Array:
        return memory.dot_products(stored, q) * q.shape[-1] ** -0.5


def _delegate(member: str) -> Any:
    """Makes a property that reads a flag or a method of the inner codec."""
    return property(lambda self: getattr(self.inner, member))


@dataclasses.dataclass(frozen=True)
class CodecWrapper(Codec):
    """A codec around an inner one, which has these members unless a subclass overrides them."""

    inner: Codec

    sequential_writes = _delegate("sequential_writes")
    supports_eviction = _delegate("supports_eviction")
    pre_rope = _delegate("pre_rope")
    is_smooth = _delegate("is_smooth")
    is_head_specific = _delegate("is_head_specific")
    num_queries = _delegate("num_queries")
    num_quantized = _delegate("num_quantized")

    def on_device(self) -> Codec:
        return dataclasses.replace(self, inner=self.inner.on_device())

    def on_host(self) -> Codec:
        return dataclasses.replace(self, inner=self.inner.on_host())


@dataclasses.dataclass(frozen=True)
class Host(CodecWrapper):
    """Places the inner codec's buffers in pinned host memory; only what a reader asks for is copied to the device."""

    inner: Codec = Plain()

    # `scores` and `mix` get what `load` returned; the others work on host buffers, which know where they are.
    append = _delegate("append")
    gather = _delegate("gather")
    scores = _delegate("scores")
    score_in_place = _delegate("score_in_place")
    mix = _delegate("mix")
    num_committed = _delegate("num_committed")
    used_part = _delegate("used_part")

    def __post_init__(self):
        object.__setattr__(self, "inner", self.inner.on_host())

    def encode_prompt(self, x: Array, pos: Array, observation: Observation | None) -> Any:
        return self._to_host(self.inner.encode_prompt(x, pos, observation))

    def encode(self, x: Array, pos: Array) -> Any:
        return self._to_host(self.inner.encode(x, pos))

    def _to_host(self, stored: Any) -> Any:
        leaves = jax.tree.leaves(stored, is_leaf=lambda x: isinstance(x, memory.Buffer))
        if not any(isinstance(x, memory.Buffer) for x in leaves):
            raise KvjaxError(
                f"{type(self.inner).__name__}.encode packs nothing, and only what `memory.pack` made can lie in host "
                "memory: return memory.pack(x) of each array [B K S W]"
            )
        return memory.map_buffers(memory.to_host, stored)

    def decode(self, stored: Any) -> Array:
        return self.inner.decode(self.load(stored))

    def load(self, stored: Any) -> Any:
        return self.inner.load(memory.map_buffers(memory.to_device, stored))

    def in_pages(self, page: int) -> Codec | None:
        inner = self.inner.in_pages(page)
        return None if inner is None else dataclasses.replace(self, inner=inner)

    def on_device(self) -> Codec:
        return self.inner.on_device()
