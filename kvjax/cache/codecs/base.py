"""How one of K or V is held: the codec, and its placement in device or host memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from kvjax.core import attention, memory
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array


class Codec:
    """Rows [B K S H] <-> what is stored. A codec reads nothing of empty slots (pos < 0): padding never sets a scale.

    A codec is a frozen dataclass with four methods: `encode`, `decode`, `append` and `gather`. The others have a
    default that follows from these; a codec gives its own where that is faster.
    """

    sequential_writes = False  # whether fresh tokens must be written one by one
    # whether a token can be written to any slot, or leave it; otherwise only behind the last one
    supports_eviction = True
    pre_rope = False  # whether it is given keys without their rotation, and gives them back so
    is_smooth = False  # whether what it gives back is a smooth function of what came, which gradients may pass as it is
    by_head = False  # whether it holds each head in a way of its own, so that rows of another cannot take its place
    num_queries: int | None = 0  # of a row's last prompt queries, as in `Needs`, that `encode_prompt` wants to see

    def encode_prompt(self, x: Array, pos: Array, observation: Observation | None) -> Any:
        """`encode` of what a prompt leaves, by a codec that asks for its queries, or goes by them."""
        return self.encode(x, pos)

    def encode(self, x: Array, pos: Array) -> Any:
        """x [B K S H], pos i32[B 1|K S] -> stored."""
        raise NotImplementedError(f"{type(self).__name__} has no method `encode`")

    def decode(self, stored: Any) -> Array:
        """stored -> [B K S H], in device memory."""
        raise NotImplementedError(f"{type(self).__name__} has no method `decode`")

    def append(self, stored: Any, x: Array, at: Array) -> Any:
        """Puts x [B K T H] into the slots from at i32[B 1|K] on; an `at` per head only where `supports_eviction`."""
        raise NotImplementedError(f"{type(self).__name__} has no method `append`")

    def gather(self, stored: Any, idx: Array) -> Array:
        """Rows idx i32[B K n] -> [B K n H] in device memory; only these move."""
        raise NotImplementedError(f"{type(self).__name__} has no method `gather`")

    def load(self, stored: Any) -> Any:
        """stored, in device memory."""
        return stored

    def scores(self, q: Array, stored: Any) -> Array:
        """q [B K G T H] against all stored keys (in device memory) -> f32[B K G T S], over the root of H."""
        return attention.scores(q, self.decode(stored))

    def score_in_place(self, q: Array, stored: Any) -> Array:
        """`scores`, computed where the keys lie if the codec can; the base brings them to the device."""
        return self.scores(q, self.load(memory.map_buffers(memory.to_device, stored)))

    def mix(self, p: Array, stored: Any) -> Array:
        """Weights f32[B K G T S] over all stored values (in device memory) -> f32[B K G T H]."""
        return attention.mix(p, self.decode(stored))

    def num_quantized(self, n: Array) -> Array:
        """n i32[B] tokens in a row -> how many of the first will be held inexactly when the next token is read."""
        return jnp.zeros_like(n)

    def num_committed(self, stored: Any, n: Array) -> Array:
        """Of n i32[B] tokens in each row, how many of the first can never be taken back: groups hold them for good."""
        return jnp.zeros_like(n) if self.supports_eviction else n

    def filled(self, stored: Any, num_tokens: int) -> Any:
        """The part of `stored` that its first tokens fill, in a cache with slots for no others; for counting bytes.

        A codec says it that has arrays of a size of its own, such as a window of recent tokens.
        """
        return stored

    def in_pages(self, page: int) -> Codec | None:
        """The codec that holds pages of `page` slots, each with tokens of one head that never change; None if none can.

        It is asked for `encode` and `decode` alone, of [B K S H] in whole pages, each filled from its front. What it
        stores has an entry for each slot as axis 2; one for each page where it is a `PagedArrays`. Raises KvjaxError
        for pages that it does not fit.
        """
        return self if self.supports_eviction else None

    def on_device(self) -> Codec:
        """The same codec without host placement."""
        return self

    def on_host(self) -> Codec:
        """The same codec, stored as suits the host, from where single rows are fetched."""
        return self


class PagedArrays:
    """Marks what is stored of pages in arrays with an entry for each page, not for each slot, as axis 2."""


@dataclasses.dataclass(frozen=True)
class Plain(Codec):
    """Rows as they are, in the model's dtype, on the device."""

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


@dataclasses.dataclass(frozen=True)
class CodecWrapper(Codec):
    """A codec around another one. What it does not say for itself is as the inner one has it."""

    inner: Codec

    @property
    def sequential_writes(self) -> bool:
        return self.inner.sequential_writes

    @property
    def supports_eviction(self) -> bool:
        return self.inner.supports_eviction

    @property
    def pre_rope(self) -> bool:
        return self.inner.pre_rope

    @property
    def is_smooth(self) -> bool:
        return self.inner.is_smooth

    @property
    def by_head(self) -> bool:
        return self.inner.by_head

    @property
    def num_queries(self) -> int | None:
        return self.inner.num_queries

    def num_quantized(self, n: Array) -> Array:
        return self.inner.num_quantized(n)

    def on_device(self) -> Codec:
        return dataclasses.replace(self, inner=self.inner.on_device())

    def on_host(self) -> Codec:
        return dataclasses.replace(self, inner=self.inner.on_host())


@dataclasses.dataclass(frozen=True)
class Host(CodecWrapper):
    """Placement: the inner codec's buffers live in pinned host memory, and only what is asked for comes back."""

    inner: Codec = Plain()

    def __post_init__(self):
        object.__setattr__(self, "inner", self.inner.on_host())

    def encode_prompt(self, x: Array, pos: Array, observation: Observation | None) -> Any:
        return memory.map_buffers(memory.to_host, self.inner.encode_prompt(x, pos, observation))

    def encode(self, x: Array, pos: Array) -> Any:
        return memory.map_buffers(memory.to_host, self.inner.encode(x, pos))

    def decode(self, stored: Any) -> Array:
        return self.inner.decode(self.load(stored))

    def load(self, stored: Any) -> Any:
        return self.inner.load(memory.map_buffers(memory.to_device, stored))

    def append(self, stored: Any, x: Array, at: Array) -> Any:
        return self.inner.append(stored, x, at)

    def gather(self, stored: Any, idx: Array) -> Array:
        return self.inner.gather(stored, idx)

    def scores(self, q: Array, stored: Any) -> Array:
        return self.inner.scores(q, stored)

    def score_in_place(self, q: Array, stored: Any) -> Array:
        return self.inner.score_in_place(q, stored)

    def mix(self, p: Array, stored: Any) -> Array:
        return self.inner.mix(p, stored)

    def num_committed(self, stored: Any, n: Array) -> Array:
        return self.inner.num_committed(stored, n)

    def filled(self, stored: Any, num_tokens: int) -> Any:
        return self.inner.filled(stored, num_tokens)

    def in_pages(self, page: int) -> Codec | None:
        inner = self.inner.in_pages(page)
        return None if inner is None else dataclasses.replace(self, inner=inner)

    def on_device(self) -> Codec:
        return self.inner.on_device()
