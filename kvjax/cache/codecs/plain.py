"""The exact codec, and the codecs that wrap another one: `Host` places its buffers in pinned host memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from kvjax.cache.storage import Codec
from kvjax.core import memory
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array
from kvjax.errors import KvjaxError


@dataclasses.dataclass(frozen=True)
class Plain(Codec):
    """Stores keys or values exactly, in the model's dtype."""

    is_smooth = True
    scores_in_place = True

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
    scores_in_place = _delegate("scores_in_place")
    read_bytes = _delegate("read_bytes")
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

    def in_window(self, by_token: Codec) -> Codec:
        return dataclasses.replace(self, inner=self.inner.in_window(by_token))

    def on_device(self) -> Codec:
        return self.inner.on_device()
