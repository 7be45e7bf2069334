"""CSKV: a low-rank copy of all heads' keys and values together, and an exact window of the newest tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from kvjax.cache.calibration.bases import JointBases
from kvjax.cache.codecs.base import CodecWrapper
from kvjax.cache.codecs.low_rank import CalibratedLowRank
from kvjax.cache.method import Method
from kvjax.core import attention, memory
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Bytes, Sizes, Trial


@pytree
class WindowState:
    """All slots in the inner codec, and exact copies of the newest ones, slot i at place i modulo P."""

    inner: Any
    newest: Array  # [B K P H]; one place is free for the next token
    n: Array  # i32[B], slots in use


@dataclasses.dataclass(frozen=True)
class ExactWindow(CodecWrapper):
    """Reads the last `window` slots exactly, a query's own included, and all others from the inner codec.

    A token is stored twice from the start, because the exact copy of one that leaves the window is overwritten in
    place; nothing has to be encoded at that moment.
    """

    window: int = 32

    sequential_writes: ClassVar[bool] = True  # whether a query sees a token exactly depends on when it asks
    supports_eviction: ClassVar[bool] = False  # the window is counted in slots

    def __post_init__(self):
        if self.window < 1:
            raise KvjaxError(f"the exact window has at least 1 token, got {self.window}; CSKV uses 32")

    def encode(self, x: Array, pos: Array) -> WindowState:
        n, num_places = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32), min(self.window + 1, x.shape[2])
        slot = _slots_at_places(n, num_places)[:, None]
        newest = jnp.where((slot >= 0)[..., None], memory.take(x, jnp.maximum(slot, 0)), jnp.zeros((), x.dtype))
        return WindowState(self.inner.encode(x, pos), newest, n)

    def append(self, stored: WindowState, x: Array, at: Array) -> WindowState:
        newest = memory.put(stored.newest, x, at % stored.newest.shape[2])
        return WindowState(self.inner.append(stored.inner, x, at), newest, at[:, 0] + x.shape[2])

    def decode(self, stored: WindowState) -> Array:
        x = self.inner.decode(stored.inner)
        slot = jnp.arange(x.shape[2], dtype=jnp.int32)[None, None]
        return self._insert_newest(stored, x, jnp.broadcast_to(slot, x.shape[:3]))

    def gather(self, stored: WindowState, idx: Array) -> Array:
        return self._insert_newest(stored, self.inner.gather(stored.inner, idx), idx)

    def load(self, stored: WindowState) -> WindowState:
        return dataclasses.replace(stored, inner=self.inner.load(stored.inner))

    def scores(self, q: Array, stored: WindowState) -> Array:
        scores = self.inner.scores(q, stored.inner)
        slot = jnp.arange(scores.shape[4], dtype=jnp.int32)[None, None]
        place = jnp.broadcast_to((slot % stored.newest.shape[2])[:, :, None, None], scores.shape)
        exact = jnp.take_along_axis(attention.scores(q, stored.newest), place, 4)
        return jnp.where(self._is_in_window(stored, slot)[:, :, None, None], exact, scores)

    def mix(self, p: Array, stored: WindowState) -> Array:
        slot = jnp.arange(p.shape[4], dtype=jnp.int32)[None, None]
        older = jnp.where(self._is_in_window(stored, slot)[:, :, None, None], 0.0, p)
        newest_slot = _slots_at_places(stored.n, stored.newest.shape[2])[:, None]
        at = jnp.broadcast_to(jnp.maximum(newest_slot, 0)[:, :, None, None], (*p.shape[:4], newest_slot.shape[2]))
        is_new = self._is_in_window(stored, newest_slot)[:, :, None, None]
        newer = jnp.where(is_new, jnp.take_along_axis(p, at, 4), 0.0)
        return self.inner.mix(older, stored.inner) + attention.mix(newer, stored.newest)

    def num_quantized(self, n: Array) -> Array:
        return jnp.maximum(n + 1 - self.window, 0)

    def _is_in_window(self, stored: WindowState, slot: Array) -> Array:
        n = stored.n[:, None, None]
        return (slot >= jnp.maximum(n - self.window, 0)) & (slot < n)

    def _insert_newest(self, stored: WindowState, x: Array, slot: Array) -> Array:
        """Replaces tokens x [B K n H] of slots i32[B K n] by their exact copies, where they are in the window."""
        exact = memory.take(stored.newest, slot % stored.newest.shape[2])
        return jnp.where(self._is_in_window(stored, slot)[..., None], exact, x)


def _slots_at_places(n: Array, num_places: int) -> Array:
    """Returns the newest of n i32[B] slots at each place of the ring, i32[B P]; negative where a place is empty."""
    place = jnp.arange(num_places, dtype=jnp.int32)[None]
    return n[:, None] - 1 - (n[:, None] - 1 - place) % num_places


def _bytes(x: Sizes) -> Bytes:
    """Half of all channels for keys, a quarter for values; an exact window of 3, and a place for the next token."""
    channels = x.K * x.H // 2 + x.K * x.H // 4
    rows = x.B * x.S * channels * x.itemsize
    bases = 4 * x.K * x.H * (channels + 2)
    window = 2 * x.rows(3 + 1) + 2 * x.per_row()
    return Bytes(rows + bases + window + x.positions(x.S) + x.per_row())


@recipe(
    "CSKV, Wang et al. 2024, arXiv 2409.10593, section 2; constants of its authors' code",
    Trial("cskv:keys=0.5,values=0.25,window=3", "cskv:keys=1,values=1,window=3", _bytes),
    formula="held: c = A (k - mean), k before RoPE and of all heads; k' = RoPE(A^T c + mean), values likewise; the "
    "last 32 tokens exact",
    differs="The authors train A and B on the hidden states, from a decomposition of the weights; here B = A^T is an "
    "orthonormal basis of the keys themselves, as `kvjax calibrate` finds it. Their code forgets the exact tokens 32 "
    "at a time, here each leaves by itself. Without their quantisation.",
    example="cskv",
    family="fewer numbers per vector",
)
def cskv(keys: float = 0.5, values: float = 0.5, window: int = 32, table: str = "shipped") -> Method:
    """All tokens as coordinates that the heads of a layer have in common; the newest tokens are exact as well.

    keys, values: directions that are held, a share of all heads' channels together (the authors' code: half). window:
    so many last tokens are read exactly, the newest included (32). table: the file of `kvjax calibrate joint_bases`, by
    default those that ship with kvjax. Keys are held without their rotation. A prompt attends
    exactly.
    """
    bases = JointBases.table_file(table)
    k, v = (
        CalibratedLowRank(0, table=bases, of="bare_keys", share=keys),
        CalibratedLowRank(0, table=bases, share=values),
    )
    return Method(k=ExactWindow(k, window), v=ExactWindow(v, window))
