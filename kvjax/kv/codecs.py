"""How one of K or V is held: the codec, and its placement in device or host memory."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from kvjax import attention, memory
from kvjax.types import Array


class Codec(Protocol):
    """Rows [B K S H] <-> what is stored. A codec reads nothing of empty slots (pos < 0): padding never sets a scale."""

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

    def on_device(self) -> Codec:
        """The same codec without host placement."""


@dataclasses.dataclass(frozen=True)
class Plain:
    """Rows as they are, in the model's dtype, on the device."""

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

    def on_device(self) -> Plain:
        return self


@dataclasses.dataclass(frozen=True)
class Host:
    """Placement: what the inner codec stores lives in pinned host memory, and only what is asked for comes back."""

    inner: Codec = Plain()

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

    def on_device(self) -> Codec:
        return self.inner.on_device()


def _each_buffer(move, stored: Any) -> Any:
    return jax.tree.map(move, stored, is_leaf=lambda x: isinstance(x, memory.Buffer))
