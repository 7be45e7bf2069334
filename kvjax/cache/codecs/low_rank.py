"""Rows held as their coordinates along a few directions: low-rank keys and values."""

from __future__ import annotations

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.binding import bind_fields
from kvjax.cache.calibration.bases import group_heads, group_size, sum_outer_products
from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.codecs.base import Codec
from kvjax.cache.eviction.representatives import fraction_of
from kvjax.cache.protocol import LayerSpec
from kvjax.core import attention, memory
from kvjax.core.mesh import over_heads
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError


@pytree
class Low:
    """The coordinates of all slots, and the directions that they belong to."""

    rows: memory.Buffer  # [B K S w], of a group's r coordinates the part that each of its heads keeps
    basis: Array  # f32[1|B K H r]: of the group's directions the part that lies in the channels of each head
    mean: Array | None  # f32[1 K 1 H]


@dataclasses.dataclass(frozen=True)
class LowRank(Codec):
    """The base of codecs that hold coordinates; `directions` says along what.

    heads: so many neighbouring key/value heads have their coordinates in common, 0: all of a layer. Each of them keeps
    an equal part, and all parts are brought together where they are read. What is read in full is not expanded: queries
    are projected once, and so is the mix of values.
    """

    heads: int = 1
    spec: LayerSpec | None = None  # of the layer, from `at`

    by_head = True
    is_smooth = True

    @property
    def supports_eviction(self) -> bool:
        return self.heads == 1  # a slot of heads together cannot be written for one of them

    def at(self, spec: LayerSpec) -> Codec:
        group_size(self.heads, spec)
        return dataclasses.replace(bind_fields(self, spec), spec=spec.without_index)

    def directions(self, x: Array) -> tuple[Array, Array | None]:
        """Of a prompt's rows [B K S H], zeros in empty slots: the basis and the mean of `Low`."""
        raise NotImplementedError

    def encode(self, x: Array, pos: Array) -> Low:
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        basis, mean = self.directions(x)
        return Low(memory.pack(self._coordinates(x, basis, mean)), basis, mean)

    def append(self, stored: Low, x: Array, at: Array) -> Low:
        new = self._coordinates(x, stored.basis, stored.mean)
        return dataclasses.replace(stored, rows=memory.append(stored.rows, new, at))

    def decode(self, stored: Low) -> Array:
        return self._expanded(self._all(stored), stored)

    def gather(self, stored: Low, idx: Array) -> Array:
        if self.heads == 1:
            return self._expanded(memory.gather_tokens(stored.rows, idx), stored)
        K, every = idx.shape[1], over_heads.gather(idx)  # each head has a part of what any of them asks for
        B, _, n = every.shape
        asked = jnp.broadcast_to(every.reshape(B, 1, -1), (B, K, every.shape[1] * n))
        together = self._together(memory.gather_tokens(stored.rows, asked), stored)
        of_heads = jnp.broadcast_to(together, (B, K, *together.shape[2:])).reshape(B, K, every.shape[1], n, -1)
        own = (over_heads.first_head(K) + jnp.arange(K, dtype=jnp.int32))[None, :, None, None, None]
        return self._expanded(jnp.take_along_axis(of_heads, own, 2)[:, :, 0], stored)

    def scores(self, q: Array, stored: Low) -> Array:
        held, q = self._all(stored), q.astype(jnp.float32)
        projected = _product(q, stored.basis[:, :, None]).astype(held.dtype)
        s = attention.scores(_facing(projected, held), held).reshape(*q.shape[:4], -1)
        s = s * (held.shape[3] / q.shape[4]) ** 0.5  # the root of H in place of that of r
        if stored.mean is None:
            return s
        return s + _product(q, stored.mean[:, :, None].swapaxes(3, 4)) * q.shape[4] ** -0.5

    def mix(self, p: Array, stored: Low) -> Array:
        held = self._all(stored)
        mixed = attention.mix(_facing(p, held), held).reshape(*p.shape[:4], -1)
        out = _product(mixed, stored.basis[:, :, None].swapaxes(3, 4))
        return out if stored.mean is None else out + p.sum(-1, keepdims=True) * stored.mean[:, :, None]

    def num_quantized(self, n: Array) -> Array:
        return n

    def _coordinates(self, x: Array, basis: Array, mean: Array | None) -> Array:
        """Rows x [B K T H] -> what is held of them, in x's dtype."""
        centred = x.astype(jnp.float32) if mean is None else x.astype(jnp.float32) - mean
        own = _product(centred, basis)
        if self.heads == 1:
            return own.astype(x.dtype)
        B, K, T, r = own.shape
        assert self.spec is not None
        size, every = group_size(self.heads, self.spec), self.spec.num_kv_heads
        member = self._groups(K)[:, None] == jnp.arange(every // size, dtype=jnp.int32)[None]
        sums = jnp.einsum("bktr,ku->btur", own, member.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        parts = over_heads.sum(sums[:, None]).reshape(B, T, every, r // size)
        return lax.dynamic_slice_in_dim(parts.swapaxes(1, 2), over_heads.first_head(K), K, 1).astype(x.dtype)

    def _groups(self, here: int) -> Array:
        """i32[K]: the group of each head of this device."""
        assert self.spec is not None
        return (over_heads.first_head(here) + jnp.arange(here, dtype=jnp.int32)) // group_size(self.heads, self.spec)

    def _all(self, stored: Low) -> Array:
        """All coordinates; see `_together`."""
        return self._together(memory.unpack(stored.rows), stored)

    def _together(self, parts: Array, stored: Low) -> Array:
        """The parts [B K n w] of heads -> the coordinates of each head's group [B K n r], or [B 1 n r] of all heads."""
        if self.heads == 1:
            return parts
        here, r = parts.shape[1], stored.basis.shape[3]
        every = over_heads.gather(parts)
        B, K, n, w = every.shape
        groups = every.reshape(B, -1, r // w, n, w).swapaxes(2, 3).reshape(B, -1, n, r)
        return groups if groups.shape[1] == 1 else jnp.take(groups, self._groups(here), 1)

    def _expanded(self, held: Array, stored: Low) -> Array:
        """Coordinates of heads -> rows [B K n H] in their dtype."""
        rows = _product(held.astype(jnp.float32), stored.basis.swapaxes(2, 3))
        return (rows if stored.mean is None else rows + stored.mean).astype(held.dtype)


@dataclasses.dataclass(frozen=True)
class CalibratedLowRank(LowRank):
    """The first directions of a table of `Bases`, the same for all rows of a batch.

    share: of the channels, rounded down, but at least one coordinate a head. of: which of the table's bases; bare keys
    are held without their rotation.
    """

    table: TableFile | None = None
    of: str = "values"
    share: float = 0.5

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise KvjaxError(f"the share of directions that are held must lie in (0, 1], got {self.share}")

    @property
    def pre_rope(self) -> bool:
        return self.of == "bare_keys"

    def at(self, spec: LayerSpec) -> Codec:
        bound = cast(CalibratedLowRank, super().at(spec))
        bound._given()  # a table that does not fit is told when the method is bound
        return bound

    def _given(self) -> tuple[np.ndarray, np.ndarray]:
        """The first directions f32[K H r], and the mean f32[K H]."""
        assert self.spec is not None and self.table is not None
        K, H, size = self.spec.num_kv_heads, self.spec.head_dim, group_size(self.heads, self.spec)
        groups, channels = K // size, size * H
        shapes = {self.of: (groups, channels, None), f"{self.of}_mean": (groups, channels)}
        basis, mean = self.table.layer_arrays(self.spec, **shapes).values()
        rank = size * max(fraction_of(self.share, H), 1)
        if rank > basis.shape[2]:
            raise KvjaxError(
                f"the table of {self.table.kind} in {self.table.path} has {basis.shape[2]} directions of {self.of}, "
                f"and {rank} are to be held: {self.share} of {channels} channels; lower the share"
            )
        return basis.reshape(K, H, -1)[:, :, :rank], mean.reshape(K, H)

    def directions(self, x: Array) -> tuple[Array, Array]:
        basis, mean = (over_heads.local_part(jnp.asarray(array), x.shape[1])[None] for array in self._given())
        return basis, mean[:, :, None]


@dataclasses.dataclass(frozen=True)
class Fitted(LowRank):
    """The directions in which a prompt's own rows are longest: their right singular vectors.

    They are the eigenvectors of the rows' outer products, summed over the tokens, so that no S x S array is made. rank:
    at most so many of them, in equal parts for the heads of a group, which are rounded up. pre_rope: whether it holds
    keys without their rotation. Rows that are written later are projected on the same directions.
    """

    rank: int = 160
    pre_rope: bool = False

    def directions(self, x: Array) -> tuple[Array, None]:
        assert self.spec is not None
        vectors = _eigenvectors(sum_outer_products(group_heads(x.astype(jnp.float32), self.heads, self.spec)))
        B, K, _, H = x.shape
        size = group_size(self.heads, self.spec)
        leading = vectors[..., ::-1][..., : min(-(-self.rank // size), H) * size]
        by_head = leading.reshape(B, self.spec.num_kv_heads, H, -1)
        return lax.dynamic_slice_in_dim(by_head, over_heads.first_head(K), K, 1), None


@jax.custom_jvp
def _eigenvectors(x: Array) -> Array:
    """Of symmetric matrices x f32[B U C C], as columns, by rising eigenvalue."""
    return _eigen(x)[1]


@_eigenvectors.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """dV = V F, with F_ij = v_i dx v_j / (l_j - l_i), and 0 where both eigenvalues are equal but for rounding.

    A prompt of fewer tokens than channels has many that are zero. Directions among equal ones are arbitrary, and rows
    that are projected on all of them, or on none, do not depend on that; the quotient would be rounding alone.
    """
    values, vectors = _eigen(primals[0])
    gap = values[..., None, :] - values[..., :, None]
    noise = 1e-5 * jnp.abs(values).max(-1)[..., None, None]
    turned = jnp.where(jnp.abs(gap) > noise, _product(vectors.swapaxes(2, 3), _product(tangents[0], vectors)), 0.0)
    return vectors, _product(vectors, turned / jnp.where(jnp.abs(gap) > noise, gap, 1.0))


def _eigen(x: Array) -> tuple[Array, Array]:
    """Eigenvalues f32[B U C], rising, and eigenvectors as columns [B U C C]."""
    # One at a time: on a CPU a batch is divided among threads, and devices that wait for each other may hold them all.
    values, vectors = lax.map(lambda matrix: tuple(jnp.linalg.eigh(matrix)), x.reshape(-1, *x.shape[2:]))
    return values.reshape(x.shape[:-1]), vectors.reshape(x.shape)


def _product(x: Array, y: Array) -> Array:
    """Matrix products in full float32, over leading axes of equal size or size 1."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _facing(x: Array, held: Array) -> Array:
    """x [B K G T n] with all heads as query heads of one, where the rows [B 1|K S r] are one head's."""
    return x.reshape(x.shape[0], held.shape[1], -1, *x.shape[3:])
