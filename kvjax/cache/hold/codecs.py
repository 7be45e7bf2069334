"""How one of K or V is held: the codec, and its placement in device or host memory."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from kvjax.core import attention, memory
from kvjax.core.types import Array


class Codec(Protocol):
    """Rows [B K S H] <-> what is stored. A codec reads nothing of empty slots (pos < 0): padding never sets a scale."""

    stepwise: bool  # whether fresh tokens must be written one by one

    def encode(self, x: Array, pos: Array) -> Any:
        """x [B K S H], pos i32[B K S] -> stored."""

    def decode(self, stored: Any) -> Array:
        """stored -> [B K S H], in device memory."""

    def load(self, stored: Any) -> Any:
        """stored, in device memory."""

    def write(self, stored: Any, x: Array, at: Array) -> Any:
        """Appends x [B K T H] at slot at i32[B] of each row."""

    def rows(self, stored: Any, idx: Array) -> Array:
        """Rows idx i32[B K n] -> [B K n H] in device memory; only these move."""

    def scores(self, q: Array, stored: Any) -> Array:
        """q [B K G T H] against all stored keys (in device memory) -> f32[B K G T S]."""

    def mix(self, p: Array, stored: Any) -> Array:
        """Weights f32[B K G T S] over all stored values (in device memory) -> f32[B K G T H]."""

    def settled(self, n: Array) -> Array:
        """n i32[B] tokens in a row -> how many of the first will be held inexactly when the next token is read."""

    def on_device(self) -> Codec:
        """The same codec without host placement."""

    def on_host(self) -> Codec:
        """The same codec, stored as suits the host, from where single rows are fetched."""


@dataclasses.dataclass(frozen=True)
class Plain:
    """Rows as they are, in the model's dtype, on the device."""

    stepwise = False

    def encode(self, x: Array, pos: Array) -> memory.Buffer:
        return memory.pack(x)

    def decode(self, stored: memory.Buffer) -> Array:
        return memory.unpack(stored)

    def load(self, stored: memory.Buffer) -> memory.Buffer:
        return stored

    def write(self, stored: memory.Buffer, x: Array, at: Array) -> memory.Buffer:
        return memory.append(stored, x, at)

    def rows(self, stored: memory.Buffer, idx: Array) -> Array:
        return memory.rows(stored, idx)

    def scores(self, q: Array, stored: memory.Buffer) -> Array:
        return attention.scores(q, self.decode(stored))

    def mix(self, p: Array, stored: memory.Buffer) -> Array:
        return attention.mix(p, self.decode(stored))

    def settled(self, n: Array) -> Array:
        return jnp.zeros_like(n)

    def on_device(self) -> Plain:
        return self

    def on_host(self) -> Plain:
        return self


@dataclasses.dataclass(frozen=True)
class Host:
    """Placement: the inner codec's buffers live in pinned host memory, and only what is asked for comes back."""

    inner: Codec = Plain()

    def __post_init__(self):
        object.__setattr__(self, "inner", self.inner.on_host())

    @property
    def stepwise(self) -> bool:
        return self.inner.stepwise

    def encode(self, x: Array, pos: Array) -> Any:
        return _each_buffer(memory.to_host, self.inner.encode(x, pos))

    def decode(self, stored: Any) -> Array:
        return self.inner.decode(self.load(stored))

    def load(self, stored: Any) -> Any:
        return self.inner.load(_each_buffer(memory.to_device, stored))

    def write(self, stored: Any, x: Array, at: Array) -> Any:
        return self.inner.write(stored, x, at)

    def rows(self, stored: Any, idx: Array) -> Array:
        return self.inner.rows(stored, idx)

    def scores(self, q: Array, stored: Any) -> Array:
        return self.inner.scores(q, stored)

    def mix(self, p: Array, stored: Any) -> Array:
        return self.inner.mix(p, stored)

    def settled(self, n: Array) -> Array:
        return self.inner.settled(n)

    def on_device(self) -> Codec:
        return self.inner.on_device()

    def on_host(self) -> Host:
        return self


def _each_buffer(move, stored: Any) -> Any:
    """What is no buffer stays where it is."""
    is_buffer = lambda x: isinstance(x, memory.Buffer)  # noqa: E731
    return jax.tree.map(lambda x: move(x) if is_buffer(x) else x, stored, is_leaf=is_buffer)
