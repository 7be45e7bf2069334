"""Tokens that lie on the device a second time, so that they need not be fetched: the first ones and the latest ones."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.core import memory
from kvjax.core.types import Array


@dataclasses.dataclass(frozen=True)
class RingBuffer:
    """P places for copies of some slots: the first `sinks` slots, and a ring of the `size` latest ones."""

    sinks: int
    size: int

    @property
    def places(self) -> int:
        """P."""
        return self.sinks + self.size

    def place(self, slot: Array) -> Array:
        """Where slots lie, if they lie here."""
        return jnp.where(slot < self.sinks, slot, self.sinks + (slot - self.sinks) % self.size)

    def slots(self, n: Array, first: Array) -> Array:
        """i32[B 1 P]: the slot in each place after n i32[B] tokens; -1 if none, or before first i32[B] and no sink."""
        place = jnp.arange(self.places, dtype=jnp.int32)[None]
        newest = (n - 1)[:, None]
        latest = newest - (newest - place) % self.size
        latest = jnp.where(latest >= first[:, None], latest, -1)
        return jnp.where(place >= self.sinks, latest, jnp.where(place <= newest, place, -1))[:, None]

    def fill(self, x: Array, slots: Array) -> memory.Buffer:
        """The rows of x [B K S H] that belong here: those of slots i32[B 1 P], zeros where that is -1."""
        rows = memory.take(x, jnp.maximum(slots, 0))
        return memory.pack(jnp.where((slots >= 0)[..., None], rows, jnp.zeros((), x.dtype)))

    def put(self, buffer: memory.Buffer, x: Array, place: Array) -> memory.Buffer:
        """The buffer [B K P H] with rows x [B K T H] in these places, i32[B 1 T]; those from P on are dropped."""
        B, K = x.shape[:2]
        index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], place)
        return dataclasses.replace(buffer, data=buffer.data.at[index].set(memory.pack(x).data, mode="drop"))
