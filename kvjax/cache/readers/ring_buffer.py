"""A device copy of a host cache's first and latest tokens, so that they need not be fetched."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.core import memory
from kvjax.core.types import Array


@dataclasses.dataclass(frozen=True)
class RingBuffer:
    """P places for copies of token vectors: the first `sinks` slots, then a ring of the `size` latest ones."""

    sinks: int
    size: int

    @property
    def places(self) -> int:
        """P."""
        return self.sinks + self.size

    def place(self, slot: Array) -> Array:
        """The place of each slot, if a copy of it exists."""
        return jnp.where(slot < self.sinks, slot, self.sinks + (slot - self.sinks) % self.size)

    def slots(self, n: Array, first: Array) -> Array:
        """i32[B 1 P]: the slot in each place after n i32[B] tokens, the ring's from `first` i32[B] on; -1 if empty."""
        place = jnp.arange(self.places, dtype=jnp.int32)[None]
        newest = (n - 1)[:, None]
        # The newest of the slots that share a place: counted, since a stored pointer would have to be rolled back too.
        latest = newest - (newest - place) % self.size
        latest = jnp.where(latest >= first[:, None], latest, -1)
        return jnp.where(place >= self.sinks, latest, jnp.where(place <= newest, place, -1))[:, None]

    def fill(self, x: Array, slots: Array) -> memory.Buffer:
        """Copies the token vectors of `slots`, i32[B 1 P], from x [B K S H]; zeros where the slot is -1."""
        tokens = memory.take(x, jnp.maximum(slots, 0))
        return memory.pack(jnp.where((slots >= 0)[..., None], tokens, jnp.zeros((), x.dtype)))

    def put(self, buffer: memory.Buffer, x: Array, place: Array) -> memory.Buffer:
        """Writes x [B K T H] into the places i32[B 1 T] of a buffer [B K P H]; places from P on are dropped."""
        # Not `memory.put`, which writes a run of slots: the places of one call may pass the end of the ring.
        B, K = x.shape[:2]
        index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], place)
        return dataclasses.replace(buffer, data=buffer.data.at[index].set(memory.pack(x).data, mode="drop"))
