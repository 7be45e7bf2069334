"""The exact codec, and the codecs that wrap another one: `Host` places its buffers in pinned host memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from kvjax.cache.storage import Codec, HostLayout, ObservingCodec, encode_prompt, observed_queries
from kvjax.core import memory
from kvjax.core.attention_mass import Observation
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import Array
from kvjax.errors import KvjaxError


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


def _delegate(member: str) -> Any:
    """Makes a property that reads a flag or a method of the inner codec."""
    return property(lambda self: getattr(self.inner, member))


@dataclasses.dataclass(frozen=True)
class CodecWrapper(Codec, HostLayout):
    """A codec around an inner one, which has its flags unless a subclass overrides them.

    The inner codec's stored form is the field `inner` of the wrapper's.
    """

    inner: Codec

    sequential_writes = _delegate("sequential_writes")
    pre_rope = _delegate("pre_rope")
    is_smooth = _delegate("is_smooth")

    @property
    def supports_eviction(self) -> bool:
        return self.inner.supports_eviction and not self.sequential_writes

    @property
    def num_queries(self) -> int | None:
        """The queries that an `ObservingCodec` among the wrappers hands on."""
        return observed_queries(self.inner)

    def num_committed(self, stored: Any, n: Array) -> Array:
        if self.sequential_writes and not self.inner.sequential_writes:
            return n  # the inner codec could take tokens back, and the wrapper may have changed its copy of them
        return self.inner.num_committed(stored.inner, n)

    def used_part(self, stored: Any, num_tokens: int) -> Any:
        return dataclasses.replace(stored, inner=self.inner.used_part(stored.inner, num_tokens))

    def read_bytes(self, stored: Any, tokens: int | None = None) -> StepBytes:
        own = dataclasses.replace(stored, inner=None)
        return self.inner.read_bytes(stored.inner, tokens) + StepBytes.of_all(own)

    def in_pages(self, page: int) -> Codec | None:
        # A wrapper may store something of a head, or of its first or last tokens, which pages of any head have not.
        return self if self.supports_eviction and self.inner.in_pages(page) is not None else None

    def in_window(self, by_token: Codec) -> Codec:
        """As the function `in_window`, for which a wrapper decides what is left of it."""
        return by_token if self.sequential_writes else self

    def on_device(self) -> Codec:
        return dataclasses.replace(self, inner=self.inner.on_device())

    def on_host(self) -> Codec:
        return dataclasses.replace(self, inner=_on_host(self.inner))


def _on_host(codec: Codec) -> Codec:
    return codec.on_host() if isinstance(codec, HostLayout) else codec


def in_window(codec: Codec, by_token: Codec) -> Codec:
    """The codec of a layer with a sliding window, whose slots are overwritten one by one, by all heads at once.

    It is `codec` where each token is stored by itself, and `by_token` where tokens are coded together.
    """
    if isinstance(codec, CodecWrapper):
        return codec.in_window(by_token)
    return by_token if codec.sequential_writes else codec


@dataclasses.dataclass(frozen=True)
class Host(CodecWrapper, ObservingCodec):
    """Places the inner codec's buffers in pinned host memory; only what a reader asks for is copied to the device."""

    inner: Codec = Plain()

    # `scores` and `mix` get what was loaded; the others work on host buffers, which know where they are.
    append = _delegate("append")
    gather = _delegate("gather")
    scores = _delegate("scores")
    mix = _delegate("mix")
    num_committed = _delegate("num_committed")
    used_part = _delegate("used_part")
    read_bytes = _delegate("read_bytes")

    def __post_init__(self):
        # In the field itself, so that two ways to write a placement make equal codecs, which share their programs.
        object.__setattr__(self, "inner", _on_host(self.inner))

    def encode(self, x: Array, pos: Array, observation: Observation | None = None) -> Any:
        stored = encode_prompt(self.inner, x, pos, observation)
        # Without a buffer nothing would move, and a cache that should lie on the host would fill the device.
        leaves = jax.tree.leaves(stored, is_leaf=lambda x: isinstance(x, memory.Buffer))
        if not any(isinstance(x, memory.Buffer) for x in leaves):
            raise KvjaxError(
                f"{type(self.inner).__name__}.encode packs nothing, and only what `memory.pack` made can lie in host "
                "memory: return memory.pack(x) of each array [B K S W]"
            )
        return memory.map_buffers(memory.to_host, stored)

    def decode(self, stored: Any) -> Array:
        return self.inner.decode(memory.load(stored))

    def in_pages(self, page: int) -> Codec | None:
        inner = self.inner.in_pages(page)
        return None if inner is None else dataclasses.replace(self, inner=inner)

    def in_window(self, by_token: Codec) -> Codec:
        return dataclasses.replace(self, inner=in_window(self.inner, by_token))

    def on_device(self) -> Codec:
        return self.inner.on_device()
