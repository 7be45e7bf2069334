"""The newest tokens as they came, and all others as another codec holds them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from kvjax.cache.codecs.base import CodecWrapper
from kvjax.core import attention, memory
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError


@pytree
class Window:
    """All slots in another codec, and the newest ones exactly as well, slot i at place i modulo P."""

    every: Any
    newest: Array  # [B K P H]; one place is free for the next token
    n: Array  # i32[B], slots in use


@dataclasses.dataclass(frozen=True)
class ExactWindow(CodecWrapper):
    """The last `window` slots are read exactly, a query's own included, and all before them from `inner`.

    A token is held by both as soon as it comes, and its exact copy is overwritten when it leaves the window.
    """

    window: int = 32

    sequential_writes: ClassVar[bool] = True  # what a query sees exactly depends on its own time
    supports_eviction: ClassVar[bool] = False  # the window is counted in slots

    def __post_init__(self):
        if self.window < 1:
            raise KvjaxError(f"the exact window has at least 1 token, got {self.window}; CSKV uses 32")

    def encode(self, x: Array, pos: Array) -> Window:
        n, places = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32), min(self.window + 1, x.shape[2])
        slot = _slots_at(n, places)[:, None]
        newest = jnp.where((slot >= 0)[..., None], memory.take(x, jnp.maximum(slot, 0)), jnp.zeros((), x.dtype))
        return Window(self.inner.encode(x, pos), newest, n)

    def append(self, stored: Window, x: Array, at: Array) -> Window:
        newest = memory.put(stored.newest, x, at % stored.newest.shape[2])
        return Window(self.inner.append(stored.every, x, at), newest, at[:, 0] + x.shape[2])

    def decode(self, stored: Window) -> Array:
        rows = self.inner.decode(stored.every)
        slot = jnp.arange(rows.shape[2], dtype=jnp.int32)[None, None]
        return self._with_newest(stored, rows, jnp.broadcast_to(slot, rows.shape[:3]))

    def gather(self, stored: Window, idx: Array) -> Array:
        return self._with_newest(stored, self.inner.gather(stored.every, idx), idx)

    def load(self, stored: Window) -> Window:
        return dataclasses.replace(stored, every=self.inner.load(stored.every))

    def scores(self, q: Array, stored: Window) -> Array:
        old = self.inner.scores(q, stored.every)
        slot = jnp.arange(old.shape[4], dtype=jnp.int32)[None, None]
        place = jnp.broadcast_to((slot % stored.newest.shape[2])[:, :, None, None], (*old.shape[:4], old.shape[4]))
        new = jnp.take_along_axis(attention.scores(q, stored.newest), place, 4)
        return jnp.where(self._is_new(stored, slot)[:, :, None, None], new, old)

    def mix(self, p: Array, stored: Window) -> Array:
        slot = jnp.arange(p.shape[4], dtype=jnp.int32)[None, None]
        old = self.inner.mix(jnp.where(self._is_new(stored, slot)[:, :, None, None], 0.0, p), stored.every)
        held = _slots_at(stored.n, stored.newest.shape[2])[:, None]
        at = jnp.broadcast_to(jnp.maximum(held, 0)[:, :, None, None], (*p.shape[:4], held.shape[2]))
        new = jnp.where(self._is_new(stored, held)[:, :, None, None], jnp.take_along_axis(p, at, 4), 0.0)
        return old + attention.mix(new, stored.newest)

    def num_quantized(self, n: Array) -> Array:
        return jnp.maximum(n + 1 - self.window, 0)

    def _is_new(self, stored: Window, slot: Array) -> Array:
        """Whether slots i32[B|1 K|1 S] lie in the window."""
        n = stored.n[:, None, None]
        return (slot >= jnp.maximum(n - self.window, 0)) & (slot < n)

    def _with_newest(self, stored: Window, rows: Array, slot: Array) -> Array:
        """Rows [B K n H] of slots i32[B K n], in the window as they came."""
        exact = memory.take(stored.newest, slot % stored.newest.shape[2])
        return jnp.where(self._is_new(stored, slot)[..., None], exact, rows)


def _slots_at(n: Array, places: int) -> Array:
    """i32[B P]: the newest of n i32[B] slots that has its copy at each place; below 0 where none has."""
    place = jnp.arange(places, dtype=jnp.int32)[None]
    return n[:, None] - 1 - (n[:, None] - 1 - place) % places
