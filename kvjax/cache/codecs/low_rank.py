"""Low-rank keys and values: each token is stored as its coordinates along a few directions."""

from __future__ import annotations

import dataclasses
from typing import Annotated, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.binding import bind_fields
from kvjax.cache.calibration.bases import group_heads, group_size, sum_outer_products
from kvjax.cache.calibration.table_file import TableFile
from kvjax.cache.eviction.representatives import fraction_of
from kvjax.cache.protocol import LayerSpec
from kvjax.cache.storage import Codec
from kvjax.core import attention, memory
from kvjax.core.matmul import eigh, matmul_in_float32
from kvjax.core.mesh import over_heads
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError
from kvjax.utils.abstract import abstract
from kvjax.utils.parameter_types import Within, check_fields


@pytree
class LowRankState:
    """The coordinates of all slots, and the directions that they belong to."""

    coordinates: memory.Buffer  # [B K S w], of the r coordinates of a group the w that each of its heads stores
    basis: Array  # f32[1|B K H r], of the group's directions the part in the channels of each head
    mean: Array | None  # f32[1 K 1 H]


@dataclasses.dataclass(frozen=True)
class LowRank(Codec):
    """The base of codecs that project tokens onto the directions of `fit_basis`.

    Neighboring heads can share their coordinates: each of them then stores an equal part, and a read gathers all parts.
    `scores` and `mix` expand no token: queries are projected once, and so is the weighted sum of values.

    Args:
      heads: key/value heads that share coordinates; 0 for all of a layer.
      spec: the layer; `at` fills it in.
    """

    heads: int = 1
    spec: LayerSpec | None = None

    is_smooth = True

    @property
    def supports_eviction(self) -> bool:
        return self.heads == 1  # heads that share coordinates cannot overwrite a slot one by one

    def in_pages(self, page: int) -> None:
        return None  # the directions of a head do not serve the head whose page it would store

    def at(self, spec: LayerSpec) -> Codec:
        """Returns the codec of one layer."""
        group_size(self.heads, spec)  # raises where groups of heads do not divide the layer
        return dataclasses.replace(bind_fields(self, spec), spec=spec.without_index)

    @abstract
    def fit_basis(self, x: Array) -> tuple[Array, Array | None]:
        """Returns basis and mean of a `LowRankState` for a prompt x [B K S H], zeros in empty slots."""
        ...

    def encode(self, x: Array, pos: Array) -> LowRankState:
        # Padding must not turn the directions: zeros add nothing to X^T X.
        x = jnp.where((pos >= 0)[..., None], x, jnp.zeros((), x.dtype))
        basis, mean = self.fit_basis(x)
        return LowRankState(memory.pack(self._project(x, basis, mean)), basis, mean)

    def append(self, stored: LowRankState, x: Array, at: Array) -> LowRankState:
        new = self._project(x, stored.basis, stored.mean)
        return dataclasses.replace(stored, coordinates=memory.append(stored.coordinates, new, at))

    def decode(self, stored: LowRankState) -> Array:
        coordinates = self._join_parts(memory.unpack(stored.coordinates), stored)
        return self._expand(coordinates, stored)

    def gather(self, stored: LowRankState, idx: Array) -> Array:
        if self.heads == 1:
            return self._expand(memory.gather_tokens(stored.coordinates, idx), stored)
        # Each head stores a part of every other head's coordinates, so all heads gather the slots that any asks for.
        K, all_idx = idx.shape[1], over_heads.gather(idx)
        B, _, n = all_idx.shape
        asked = jnp.broadcast_to(all_idx.reshape(B, 1, -1), (B, K, all_idx.shape[1] * n))
        coordinates = self._join_parts(memory.gather_tokens(stored.coordinates, asked), stored)
        by_asking_head = jnp.broadcast_to(coordinates, (B, K, *coordinates.shape[2:]))
        by_asking_head = by_asking_head.reshape(B, K, all_idx.shape[1], n, -1)
        own = (over_heads.first_head(K) + jnp.arange(K, dtype=jnp.int32))[None, :, None, None, None]
        return self._expand(jnp.take_along_axis(by_asking_head, own, 2)[:, :, 0], stored)

    def scores(self, q: Array, stored: LowRankState) -> Array:
        coordinates = self._join_parts(memory.unpack(stored.coordinates), stored)
        q = q.astype(jnp.float32)
        # q (B c) = (q B) c: a query is projected once, in place of expanding every key.
        projected = matmul_in_float32(q, stored.basis[:, :, None]).astype(coordinates.dtype)
        s = attention.scores(_as_queries_of(projected, coordinates), coordinates).reshape(*q.shape[:4], -1)
        s = s * (coordinates.shape[3] / q.shape[4]) ** 0.5  # `attention.scores` divides by sqrt(r), keys need sqrt(H)
        if stored.mean is None:
            return s
        return s + matmul_in_float32(q, stored.mean[:, :, None].swapaxes(3, 4)) * q.shape[4] ** -0.5

    def mix(self, p: Array, stored: LowRankState) -> Array:
        coordinates = self._join_parts(memory.unpack(stored.coordinates), stored)
        # Likewise sum p (B c) = B (sum p c), in r numbers a token in place of H.
        mixed = attention.mix(_as_queries_of(p, coordinates), coordinates).reshape(*p.shape[:4], -1)
        out = matmul_in_float32(mixed, stored.basis[:, :, None].swapaxes(3, 4))
        return out if stored.mean is None else out + p.sum(-1, keepdims=True) * stored.mean[:, :, None]

    def read_bytes(self, stored: LowRankState, tokens: int | None = None) -> StepBytes:
        # Each head holds a part of the coordinates of all the slots that any head asks for.
        asked = tokens if tokens is None or self.heads == 1 else tokens * stored.coordinates.data.shape[1]
        return super().read_bytes(stored, asked)

    def _project(self, x: Array, basis: Array, mean: Array | None) -> Array:
        """x [B K T H] -> the coordinates that each head stores [B K T w], in x's dtype."""
        # In float32: keys have a few large channels, and a 16-bit sum that one of them enters loses the small ones.
        centered = x.astype(jnp.float32) if mean is None else x.astype(jnp.float32) - mean
        own = matmul_in_float32(centered, basis)
        if self.heads == 1:
            return own.astype(x.dtype)
        # A group's coordinates are the sums of what its heads contribute; then each head keeps its part of them.
        B, K, T, r = own.shape
        assert self.spec is not None
        size, num_heads = group_size(self.heads, self.spec), self.spec.num_kv_heads
        is_member = self._group_of_heads(K)[:, None] == jnp.arange(num_heads // size, dtype=jnp.int32)[None]
        sums = jnp.einsum("bktr,ku->btur", own, is_member.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        parts = over_heads.sum(sums[:, None]).reshape(B, T, num_heads, r // size)
        return lax.dynamic_slice_in_dim(parts.swapaxes(1, 2), over_heads.first_head(K), K, 1).astype(x.dtype)

    def _group_of_heads(self, num_local: int) -> Array:
        """i32[K]: the group of each head of this device."""
        assert self.spec is not None
        head = over_heads.first_head(num_local) + jnp.arange(num_local, dtype=jnp.int32)
        return head // group_size(self.heads, self.spec)

    def _join_parts(self, parts: Array, stored: LowRankState) -> Array:
        """Stored parts [B K n w] -> the coordinates of each head's group [B K n r], or [B 1 n r] of a single group."""
        if self.heads == 1:
            return parts
        num_local, r = parts.shape[1], stored.basis.shape[3]
        parts = over_heads.gather(parts)
        B, K, n, w = parts.shape
        groups = parts.reshape(B, -1, r // w, n, w).swapaxes(2, 3).reshape(B, -1, n, r)
        return groups if groups.shape[1] == 1 else jnp.take(groups, self._group_of_heads(num_local), 1)

    def _expand(self, coordinates: Array, stored: LowRankState) -> Array:
        """Coordinates [B 1|K n r] -> tokens [B K n H], in the same dtype."""
        x = matmul_in_float32(coordinates.astype(jnp.float32), stored.basis.swapaxes(2, 3))
        return (x if stored.mean is None else x + stored.mean).astype(coordinates.dtype)


@dataclasses.dataclass(frozen=True)
class CalibratedLowRank(LowRank):
    """Projects onto the leading directions of a calibrated table of `Bases`, equal for all sequences of a batch.

    Args:
      table: the file.
      of: which of the table's bases; with "bare_keys" the codec stores keys before their rotation.
      share: fraction of the channels that are stored, rounded down, at least one per head.
    """

    table: TableFile | None = None
    of: str = "values"
    share: Annotated[float, Within("(0, 1]")] = 0.5

    __post_init__ = check_fields

    @property
    def pre_rope(self) -> bool:
        return self.of == "bare_keys"

    def at(self, spec: LayerSpec) -> Codec:
        bound = cast(CalibratedLowRank, super().at(spec))
        # Read again in `fit_basis`, from a cache of files: arrays as fields would be hashed and compared in every call.
        bound._read_table()  # raises here, when the method is bound, for a table that does not fit the model
        return bound

    def _read_table(self) -> tuple[np.ndarray, np.ndarray]:
        """The leading directions f32[K H r], and the mean f32[K H]."""
        assert self.spec is not None and self.table is not None
        K, size = self.spec.num_kv_heads, group_size(self.heads, self.spec)
        H = self.spec.value_dim if self.of == "values" else self.spec.head_dim
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

    def fit_basis(self, x: Array) -> tuple[Array, Array]:
        basis, mean = (over_heads.local_part(jnp.asarray(array), x.shape[1])[None] for array in self._read_table())
        return basis, mean[:, :, None]


@dataclasses.dataclass(frozen=True)
class PromptLowRank(LowRank):
    """Projects onto the leading right singular vectors of a prompt's own keys or values.

    Tokens that are appended later are projected onto the same directions.

    Args:
      rank: directions of a group of heads at most; they are divided equally among its heads, rounded up.
      pre_rope: whether it stores keys before their rotation.
    """

    rank: int = 160
    pre_rope: bool = False

    def fit_basis(self, x: Array) -> tuple[Array, None]:
        assert self.spec is not None
        # Right singular vectors are the eigenvectors of X^T X: no S x S array is made.
        vectors = _eigenvectors(sum_outer_products(group_heads(x.astype(jnp.float32), self.heads, self.spec)))
        B, K, _, H = x.shape
        size = group_size(self.heads, self.spec)
        # `eigh` sorts by ascending eigenvalue; the leading directions stand last.
        leading = vectors[..., ::-1][..., : min(-(-self.rank // size), H) * size]
        by_head = leading.reshape(B, self.spec.num_kv_heads, H, -1)
        return lax.dynamic_slice_in_dim(by_head, over_heads.first_head(K), K, 1), None


@jax.custom_jvp
def _eigenvectors(x: Array) -> Array:
    """Eigenvectors of symmetric matrices x f32[B U C C], as columns, by ascending eigenvalue."""
    return eigh(x)[1]


@_eigenvectors.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """dV = V F with F_ij = v_i dx v_j / (l_j - l_i), and F_ij = 0 where the eigenvalues are equal up to rounding.

    A prompt with fewer tokens than channels has many eigenvalues of zero. The directions among equal ones are
    arbitrary, and tokens that are projected onto all or none of them do not depend on the choice; the quotient would be
    rounding noise.
    """
    values, vectors = eigh(primals[0])
    gap = values[..., None, :] - values[..., :, None]
    noise = 1e-5 * jnp.abs(values).max(-1)[..., None, None]
    turned = matmul_in_float32(vectors.swapaxes(2, 3), matmul_in_float32(tangents[0], vectors))
    rotated = jnp.where(jnp.abs(gap) > noise, turned, 0.0)
    return vectors, matmul_in_float32(vectors, rotated / jnp.where(jnp.abs(gap) > noise, gap, 1.0))


def _as_queries_of(x: Array, coordinates: Array) -> Array:
    """x [B K G T n] -> [B 1|K K*G|G T n]: where coordinates belong to a single group, all heads query that group."""
    return x.reshape(x.shape[0], coordinates.shape[1], -1, *x.shape[3:])
