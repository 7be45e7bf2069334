"""Keys rotated over several heads together, the layer's channels in an order that puts like ones side by side."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax.cache.binding import bind_fields
from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.codecs.base import Codec, CodecWrapper
from kvjax.cache.codecs.per_token import hadamard
from kvjax.cache.protocol import LayerSpec
from kvjax.core.mesh import over_heads
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError


@pytree
class Reordered:
    """What another codec holds of the rotated channels of all heads: head k has places k H to k H + H - 1."""

    rows: Any
    order: Array  # i32[1|B K H], the channel at each place, counted over all heads
    dtype: str = dataclasses.field(metadata={"static": True})  # that the keys came in


@dataclasses.dataclass(frozen=True)
class CrossHeadRotation(CodecWrapper):
    """Another codec, for bare keys that Hadamard's matrix has spread over `heads` neighbouring heads (RotateKV).

    Where these do not divide a layer's heads, it is as many as divide both; 0 stands for all heads.

    Su et al. 2025, arXiv 2501.16383, and its authors' code: the channels of a group of heads are multiplied by
    Sylvester's matrix of their number, over its root. Then the channels of the whole layer are sorted by their sum over
    the tokens, the least first, so that what shares a scale is alike, and each head holds H of them. The order is that
    of a row's own prompt, of equal channels as they stand; or, with `means`, a table of `Bases`, that of its mean key.
    On several devices each holds its heads' places, and gathers those of the others where keys are read.
    """

    heads: int = 4
    means: TableFile | None = None
    spec: LayerSpec | None = None  # of the layer, from `at`

    pre_rope: ClassVar[bool] = True
    supports_eviction: ClassVar[bool] = False  # a slot of all heads together cannot be written for one of them

    @property
    def is_head_specific(self) -> bool:
        return self.means is not None  # whose order is that of certain heads

    def at(self, spec: LayerSpec) -> Codec:
        bound = dataclasses.replace(bind_fields(self, spec), spec=spec.without_index)
        if bound._together & (bound._together - 1):
            raise KvjaxError(
                f"Hadamard's matrix exists here for powers of two, and {bound._together} channels, of "
                f"{bound._together // spec.head_dim} heads, would be rotated together; use another number of heads"
            )
        if self.means is not None:
            bound._mean_key()  # a table that does not fit is told when the method is bound
        return bound

    def encode(self, x: Array, pos: Array) -> Reordered:
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        rotated = self._rotated(x)
        order = self._order(rotated.sum(1) if self.means is None else self._mean_key(), x.shape[1])
        return Reordered(self.inner.encode(_placed(rotated, order), over_heads.max(pos)), order, x.dtype.name)

    def append(self, stored: Reordered, x: Array, at: Array) -> Reordered:
        new = _placed(self._rotated(x), stored.order)
        return dataclasses.replace(stored, rows=self.inner.append(stored.rows, new, at))

    def decode(self, stored: Reordered) -> Array:
        return self._keys(self.inner.decode(stored.rows), stored.order).astype(stored.dtype)

    def gather(self, stored: Reordered, idx: Array) -> Array:
        """Of the slots that any head asks for all places are fetched, since each key is made of them."""
        assert self.spec is not None
        B, here, n = idx.shape
        asked = over_heads.gather(idx).reshape(B, 1, -1)
        held = self.inner.gather(stored.rows, jnp.broadcast_to(asked, (B, here, asked.shape[2])))
        keys = self._keys(held, stored.order).reshape(B, here, self.spec.num_kv_heads, n, self.spec.head_dim)
        mine = (over_heads.first_head(here) + jnp.arange(here, dtype=jnp.int32))[None, :, None, None, None]
        return jnp.take_along_axis(keys, mine, 2)[:, :, 0].astype(stored.dtype)

    def load(self, stored: Reordered) -> Reordered:
        return dataclasses.replace(stored, rows=self.inner.load(stored.rows))

    def num_committed(self, stored: Reordered, n: Array) -> Array:
        return self.inner.num_committed(stored.rows, n)

    @property
    def _together(self) -> int:
        """How many channels are rotated together."""
        assert self.spec is not None
        return math.gcd(self.heads, self.spec.num_kv_heads) * self.spec.head_dim

    def _mean_key(self) -> Array:
        """f32[1 K*H]: the mean of the rotated keys that the table was made of."""
        assert self.spec is not None and self.means is not None
        K, H = self.spec.num_kv_heads, self.spec.head_dim
        mean = self.means.layer_arrays(self.spec, bare_keys_mean=(K, H))["bare_keys_mean"]
        return self._turned(jnp.asarray(mean, jnp.float32).reshape(1, K * H))

    def _order(self, sums: Array, here: int) -> Array:
        """i32[1|B K H]: the channels in the places of this device's heads, by sums f32[1|B C] of all channels."""
        assert self.spec is not None
        order = jnp.argsort(sums, -1, stable=True).astype(jnp.int32)
        places = order.reshape(order.shape[0], self.spec.num_kv_heads, -1)
        return lax.dynamic_slice_in_dim(places, over_heads.first_head(here), here, 1)

    def _rotated(self, x: Array) -> Array:
        """Keys x [B K T H] of this device's heads -> the rotated channels of all heads, f32[B T C]."""
        return self._turned(_joined(over_heads.gather(x.astype(jnp.float32)).swapaxes(1, 2)))

    def _keys(self, held: Array, order: Array) -> Array:
        """This device's places f32[B K T H] -> its heads' keys, f32[B K T H]."""
        here, every = held.shape[1], over_heads.gather(held).swapaxes(1, 2)
        places = jnp.argsort(_joined(over_heads.gather(order)), -1)
        rotated = jnp.take_along_axis(_joined(every), places[:, None], -1)
        keys = self._turned(rotated).reshape(every.shape)
        return lax.dynamic_slice_in_dim(keys, over_heads.first_head(here), here, 2).swapaxes(1, 2)

    def _turned(self, x: Array) -> Array:
        """x f32[... C], each group of heads rotated; the rotation is its own inverse."""
        groups = x.reshape(*x.shape[:-1], x.shape[-1] // self._together, self._together)
        matrix = jnp.asarray(hadamard(self._together))
        return jnp.einsum("...h,hj->...j", groups, matrix, precision=lax.Precision.HIGHEST).reshape(x.shape)


def _placed(rotated: Array, order: Array) -> Array:
    """Rotated channels f32[B T C] in the places of an order i32[1|B K H] -> [B K T H]."""
    return jnp.take_along_axis(rotated[:, None], order[:, :, None], -1)


def _joined(x: Array) -> Array:
    """[... K H] -> [... K*H]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
