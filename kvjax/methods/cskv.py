"""CSKV: a low-rank copy of all heads' keys and values together, and an exact window of the newest tokens."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp

from kvjax import method_api as kv


@kv.pytree
class WindowState:
    """All slots in the inner codec, and exact copies of the newest ones, slot i at place i modulo P."""

    inner: Any
    # [B K P H]. P is one more than the window: in a chunk, the padding of a short sequence is written to that place.
    newest: kv.Array
    n: kv.Array  # i32[B], slots that were written, with padding


@dataclasses.dataclass(frozen=True)
class ExactWindow(kv.CodecWrapper):
    """Reads the last `window` slots exactly, a query's own included, and all others from the inner codec.

    Every token is also encoded when it arrives, so that when it leaves the window, its exact copy is just overwritten.
    """

    window: kv.PositiveInt = 32

    sequential_writes: ClassVar[bool] = True  # a token is exact until the window, which is counted in slots, has passed

    __post_init__ = kv.check_fields

    def encode(self, x: kv.Array, pos: kv.Array) -> WindowState:
        n = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        slot = kv.RingBuffer(0, min(self.window + 1, x.shape[2])).slots(n, jnp.zeros_like(n))
        newest = kv.memory.take(x, jnp.maximum(slot, 0))
        newest = jnp.where((slot >= 0)[..., None], newest, jnp.zeros((), x.dtype))
        return WindowState(self.inner.encode(x, pos), newest, n)

    def append(self, stored: WindowState, x: kv.Array, at: kv.Array) -> WindowState:
        newest = kv.memory.put(stored.newest, x, at % stored.newest.shape[2])
        return WindowState(self.inner.append(stored.inner, x, at), newest, at[:, 0] + x.shape[2])

    def decode(self, stored: WindowState) -> kv.Array:
        x = self.inner.decode(stored.inner)
        slot = jnp.arange(x.shape[2], dtype=jnp.int32)[None, None]
        return self._insert_newest(stored, x, jnp.broadcast_to(slot, x.shape[:3]))

    def gather(self, stored: WindowState, idx: kv.Array) -> kv.Array:
        return self._insert_newest(stored, self.inner.gather(stored.inner, idx), idx)

    def scores(self, q: kv.Array, stored: WindowState) -> kv.Array:
        scores = self.inner.scores(q, stored.inner)
        slot = jnp.arange(scores.shape[4], dtype=jnp.int32)[None, None]
        place = jnp.broadcast_to((slot % stored.newest.shape[2])[:, :, None, None], scores.shape)
        # The logits of the window's few places are computed once, and each slot takes that of its place.
        exact = jnp.take_along_axis(kv.attention.scores(q, stored.newest), place, 4)
        is_exact = self._is_in_window(stored, slot)
        return jnp.where(is_exact[:, :, None, None], exact, scores)

    def mix(self, p: kv.Array, stored: WindowState) -> kv.Array:
        slot = jnp.arange(p.shape[4], dtype=jnp.int32)[None, None]
        is_exact = self._is_in_window(stored, slot)
        older = jnp.where(is_exact[:, :, None, None], 0.0, p)
        newest = kv.RingBuffer(0, stored.newest.shape[2]).slots(stored.n, jnp.zeros_like(stored.n))
        at = jnp.broadcast_to(jnp.maximum(newest, 0)[:, :, None, None], (*p.shape[:4], newest.shape[2]))
        is_new = self._is_in_window(stored, newest)[:, :, None, None]
        newer = jnp.where(is_new, jnp.take_along_axis(p, at, 4), 0.0)
        return self.inner.mix(older, stored.inner) + kv.attention.mix(newer, stored.newest)

    def _is_in_window(self, stored: WindowState, slot: kv.Array) -> kv.Array:
        n = stored.n[:, None, None]
        return (slot >= jnp.maximum(n - self.window, 0)) & (slot < n)

    def _insert_newest(self, stored: WindowState, x: kv.Array, slot: kv.Array) -> kv.Array:
        """Replaces tokens x [B K n H] of slots i32[B K n] by their exact copies, where they are in the window."""
        exact = kv.memory.take(stored.newest, slot % stored.newest.shape[2])
        return jnp.where(self._is_in_window(stored, slot)[..., None], exact, x)


@kv.register_method(family="fewer numbers per vector")
def cskv(
    keys: Annotated[float, kv.Within("(0, 1]")] = 0.5,
    values: Annotated[float, kv.Within("(0, 1]")] = 0.5,
    window: int = 32,
    table: str = "shipped",
) -> kv.Method:
    """Stores all tokens as coordinates in a basis that the heads of a layer share; the newest tokens are also exact.

    Keys are stored without RoPE. Attention in the prompt is exact.

    Formula:
      stored: c = A (k - mean), k before RoPE and of all heads; k' = RoPE(A^T c + mean), values likewise; the last
      `window` tokens exact

    Differs:
      The authors train A and B on the hidden states, from a decomposition of the weights; here B = A^T is an
      orthonormal basis of the keys themselves, as `kvjax calibrate` finds it. Their code drops the exact tokens 32 at a
      time, here one leaves per step. Their quantization is left out.

    Args:
      keys: directions stored of a key, as a fraction of all heads' channels together (the authors' code: half).
      values: directions stored of a value, likewise.
      window: last tokens that are read exactly, the newest included (the authors: 32).
      table: the file of `kvjax calibrate joint_bases`; "shipped" for the tables that ship with kvjax.

    Reference:
      CSKV, Wang et al. 2024, arXiv 2409.10593, section 2; constants of its authors' code
    """
    bases = kv.JointBases.table_file(table)
    k = kv.CalibratedLowRank(heads=0, table=bases, of="bare_keys", share=keys)
    v = kv.CalibratedLowRank(heads=0, table=bases, share=values)
    return kv.Method(k=ExactWindow(k, window), v=ExactWindow(v, window))
