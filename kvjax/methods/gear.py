"""GEAR: few bits, and the quantization error as outliers and a low-rank matrix."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.codecs.chunk_quant import Channelwise, ChunkCodec, ChunkCodes, ChunkState, Tokenwise, compute_if
from kvjax.cache.codecs.outliers import ChannelOutliers, Outliers, TokenOutliers

JACOBI_SWEEPS = 10  # over all pairs of rows; float32 needs six to nine of them for matrices of up to 256 rows


@kv.pytree
class GearState:
    """The codes of all slots, and the three things that are added to them."""

    codes: ChunkState
    outliers: Any
    coordinates: kv.memory.Buffer  # [B K S r] of each token's error, r the greater of both ranks
    prompt_basis: kv.Array  # [B K H rank], the directions of the prompt's coordinates
    chunk_bases: kv.Array  # [B K U H*later], those of each decoded chunk; its rank is at most its number of tokens


@dataclasses.dataclass(frozen=True)
class LowRankResidual(kv.Codec):
    """Stores X as codes of (X - S), plus outliers S, plus a low-rank matrix L (GEAR, 2403.05527, section 4).

    The outliers come back exactly. L is the best matrix of its rank for the error E that the codes leave elsewhere
    (tokens times channels of a head): E is projected on its leading singular vectors, the eigenvectors of E^T E or,
    with fewer tokens than channels, of E E^T. The prompt is one chunk; decoded tokens stay exact until their chunk is
    full, as in the backbone.

    Args:
      backbone: the codec of the codes.
      outliers: the rule that finds S.
      rank: rank of L for the prompt.
      later: rank of L for each chunk of decoded tokens.
    """

    backbone: ChunkCodec
    outliers: Outliers
    rank: kv.PositiveInt = 4
    later: kv.PositiveInt = 2

    sequential_writes = True  # tokens of a chunk share their ranges and their basis, and are exact until it is full

    __post_init__ = kv.check_fields

    def num_committed(self, stored: GearState, n: kv.Array) -> kv.Array:
        return self.backbone.num_committed(stored.codes, n)

    def encode(self, x: kv.Array, pos: kv.Array) -> GearState:
        B, K, S, H = x.shape
        real = jnp.broadcast_to(pos >= 0, (B, K, S))
        x = jnp.where(real[..., None], x, jnp.zeros((), x.dtype))
        is_outlier, without_outliers = self.outliers.find(x, real)
        codes = self.backbone.encode(without_outliers, pos)
        restored = self.backbone.decode(codes)
        coordinates, basis = self._factorize_error(x, restored, real[..., None] & ~is_outlier, self.rank)
        chunk_rank = min(self.later, self.backbone.every, H)
        return GearState(
            codes,
            self.outliers.init_state(x, is_outlier, self.backbone.every),
            kv.memory.pack(coordinates),
            basis,
            jnp.zeros((B, K, self.backbone.num_chunks(S), H * chunk_rank), x.dtype),
        )

    def append(self, stored: GearState, x: kv.Array, at: kv.Array) -> GearState:
        """Quantizes a chunk that is full, then stores x [B K 0|1 H] exactly, at slot at i32[B 1]."""
        is_due = self.backbone.is_due(stored.codes, at)
        if self.backbone.num_chunks(stored.codes.slots):
            stored = self._append_chunk(stored, is_due)
        return dataclasses.replace(stored, codes=self.backbone.append_recent(stored.codes, x, at))

    def _append_chunk(self, stored: GearState, is_due: kv.Array) -> GearState:
        """Quantizes the full chunks of the sequences that are due, bool[B]."""

        def quantize(x: kv.Array) -> tuple[ChunkCodes, Any, kv.Array, kv.Array]:
            is_outlier, without_outliers = self.outliers.find(x, jnp.ones(x.shape[:3], bool))
            codes = self.backbone.encode_chunk(without_outliers)
            listed = None if stored.outliers is None else self.outliers.list_outliers(x, is_outlier)
            return codes, listed, *self._factorize_error(x, self.backbone.restore(*codes), ~is_outlier, self.later)

        recent = self.backbone.recent_chunk(stored.codes)
        codes, listed, coordinates, basis = compute_if(is_due.any(), quantize, recent)
        at = stored.codes.num_quantized[:, None]
        chunk = self.backbone.chunk_index(stored.codes, at)
        # An index beyond the last chunk is dropped, so sequences that are not due stay as they are.
        place = jnp.where(is_due[:, None], chunk, stored.chunk_bases.shape[2])
        return GearState(
            self.backbone.append_chunk(stored.codes, codes, is_due),
            self.outliers.add(stored.outliers, listed, at, chunk, is_due),
            kv.memory.append(stored.coordinates, coordinates, at, is_due),
            stored.prompt_basis,
            kv.memory.put(stored.chunk_bases, basis.reshape(*recent.shape[:2], 1, -1), place),
        )

    def decode(self, stored: GearState) -> kv.Array:
        x = self.backbone.decode(stored.codes)
        return self._add_residual(stored, x, kv.memory.unpack(stored.coordinates), None)

    def gather(self, stored: GearState, idx: kv.Array) -> kv.Array:
        coordinates = kv.memory.gather_tokens(stored.coordinates, idx)
        return self._add_residual(stored, self.backbone.gather(stored.codes, idx), coordinates, idx)

    def _add_residual(self, stored: GearState, x: kv.Array, coordinates: kv.Array, idx: kv.Array | None) -> kv.Array:
        """Adds L, by its coordinates [B K n r], and outliers to the dequantized tokens x [B K n H] of slots idx.

        idx is i32[B K n], or None for all slots, in order.
        """
        B, K, n, H = x.shape
        slot = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (B, K, n)) if idx is None else idx
        low_rank = _combine(coordinates, jnp.moveaxis(stored.prompt_basis, 3, 0)[:, :, :, None])
        if num_chunks := stored.chunk_bases.shape[2]:
            chunk = self.backbone.chunk_index(stored.codes, slot)
            # Vector by vector before the gather, while they are few: their rank as the last axis of all slots would
            # fill a TPU's lanes with padding.
            bases = stored.chunk_bases.reshape(B, K, num_chunks, H, -1).swapaxes(3, 4).reshape(B, K, num_chunks, -1)
            bases = kv.memory.take(bases, jnp.clip(chunk, 0, num_chunks - 1))
            later = _combine(coordinates, jnp.split(bases, bases.shape[3] // H, 3))
            low_rank = jnp.where((chunk < 0)[..., None], low_rank, later)
        whole = (x.astype(jnp.float32) + low_rank).astype(x.dtype)
        whole = self.outliers.insert(stored.outliers, whole, idx)
        return jnp.where((slot < stored.codes.num_quantized[:, None, None])[..., None], whole, x)

    def _factorize_error(
        self, x: kv.Array, restored: kv.Array, counts: kv.Array, rank: int
    ) -> tuple[kv.Array, kv.Array]:
        """Factorizes what codes leave of tokens x [B K n H], where it counts, bool[B K n H].

        Returns:
          Coordinates [B K n r], padded with zeros to the greater of both ranks, and a basis [B K H rank].
        """
        error = jnp.where(counts, x.astype(jnp.float32) - restored.astype(jnp.float32), 0.0)
        n, H = x.shape[2:]
        transposed = error.swapaxes(2, 3)
        # The smaller of the two Gram matrices has the same leading part of the decomposition. Its vectors are rounded
        # to the dtype that stores them before the error is projected on them, so that the other factor makes up for it.
        if n < H:
            coordinates = leading_eigenvectors(kv.sum_outer_products(transposed), min(rank, n)).astype(x.dtype)
            basis = jnp.matmul(transposed, coordinates.astype(jnp.float32), precision=lax.Precision.HIGHEST)
            basis = basis.astype(x.dtype)
        else:
            basis = leading_eigenvectors(kv.sum_outer_products(error), min(rank, H)).astype(x.dtype)
            coordinates = jnp.matmul(error, basis.astype(jnp.float32), precision=lax.Precision.HIGHEST)
            coordinates = coordinates.astype(x.dtype)
        width = min(max(self.rank, self.later), H)
        return jnp.pad(coordinates, [(0, 0)] * 3 + [(0, width - coordinates.shape[3])]), basis


def _combine(coordinates: kv.Array, basis: Iterable[kv.Array]) -> kv.Array:
    """Combines r' basis vectors [B K 1|n H] by each token's first r' coordinates [B K n r] -> f32[B K n H]."""
    products = (coordinates[..., i, None].astype(jnp.float32) * v.astype(jnp.float32) for i, v in enumerate(basis))
    return functools.reduce(jnp.add, products)


def leading_eigenvectors(matrix: kv.Array, count: int) -> kv.Array:
    """Computes the eigenvectors of the greatest eigenvalues of positive semidefinite matrices.

    It uses Jacobi's method in plain array operations: each round rotates n / 2 disjoint pairs of rows and columns so
    that the entry where they meet becomes zero, and then pairs them anew, as in a tournament (Brent & Luk 1985).
    LAPACK's `eigh` cannot stand in a decode step: on several CPU devices its threads and the collectives of other
    devices wait for each other.

    Args:
      matrix: f32[... n n].
      count: how many eigenvectors.

    Returns:
      f32[... n count], an eigenvector a column.
    """
    n = matrix.shape[-1]
    largest = jnp.abs(matrix).max((-2, -1), keepdims=True)
    a = matrix / jnp.where(largest > 0, largest, 1.0)
    if n % 2:  # an extra row gives every row a partner; its eigenvalue is the least
        a = jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, 1), (0, 1)]).at[..., n, n].set(-1.0)
    size = n + n % 2
    half = size // 2

    # The seats of the next round: the first row stays and the others move around it, so that in size - 1 rounds every
    # row i has stood opposite, at i + half, of every other row.
    top_seats, bottom_seats = list(range(half)), list(range(half, size))
    if size > 2:
        top_seats, bottom_seats = [0, bottom_seats[0], *top_seats[1:-1]], [*bottom_seats[1:], top_seats[-1]]
    order = np.array(top_seats + bottom_seats, np.int32)

    def rotate_pairs(x: kv.Array, cosine: kv.Array, sine: kv.Array) -> kv.Array:
        first, second = x[..., :half, :], x[..., half:, :]
        return jnp.concatenate([cosine * first - sine * second, sine * first + cosine * second], -2)

    def run_round(_: kv.Array, carry: tuple[kv.Array, kv.Array]) -> tuple[kv.Array, kv.Array]:
        a, vectors = carry
        cosine, sine = _jacobi_angles(a)
        a = rotate_pairs(rotate_pairs(a, cosine, sine).swapaxes(-2, -1), cosine, sine)
        return a[..., order, :][..., order], rotate_pairs(vectors, cosine, sine)[..., order, :]

    start = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), a.shape)  # eigenvectors as rows
    a, vectors = lax.fori_loop(0, JACOBI_SWEEPS * (size - 1), run_round, (a, kv.vary(start)))
    values = jnp.diagonal(a, axis1=-2, axis2=-1)
    best = jnp.argsort(-values, axis=-1)[..., :count, None]
    return jnp.take_along_axis(vectors, best, -2)[..., :n].swapaxes(-2, -1)


def _jacobi_angles(a: kv.Array) -> tuple[kv.Array, kv.Array]:
    """Computes the cosines and sines f32[... n/2 1] that make zero the entries where rows i and i + n / 2 meet."""
    half = a.shape[-1] // 2
    diagonal = jnp.diagonal(a, axis1=-2, axis2=-1)
    off_diagonal = jnp.diagonal(a[..., :half, half:], axis1=-2, axis2=-1)
    ratio = (diagonal[..., half:] - diagonal[..., :half]) / jnp.where(off_diagonal == 0, 1.0, 2 * off_diagonal)
    # The smaller of the two roots: its angle is at most an eighth of a turn, which is what makes the sweeps converge.
    tangent = jnp.where(ratio >= 0, 1.0, -1.0) / (jnp.abs(ratio) + jnp.sqrt(1 + jnp.square(ratio)))
    tangent = jnp.where(off_diagonal == 0, 0.0, tangent)
    cosine = 1 / jnp.sqrt(1 + jnp.square(tangent))
    return cosine[..., None], (tangent * cosine)[..., None]


@kv.register_method(example="gear:bits=2", family="quantization by channel and group")
def gear(bits: int = 4, rank: int = 4, later: int = 2, share: float = 0.02, every: int = 20) -> kv.Method:
    """Quantizes keys by channel and values by token, and adds their error as a low-rank matrix and exact outliers.

    Attention in the prompt is exact.

    Formula:
      X' = Q(X - S) + S + L; S: the 1 % largest and 1 % smallest of each channel of keys and each token of values; Q:
      min/max codes of the same vectors; L: the best matrix of rank r for X - Q - S, of each head

    Differs:
      L comes from eigenvectors of the error's products, not from power iteration on random numbers, and outliers are
      restored exactly, where the public code adds L to them too; values have outliers and scales for each head, not for
      all heads of a token; codes have 2^bits levels, where the code passes bits^2 - 1 steps. KIVI's groups are left
      out.

    Args:
      bits: bits of the codes (the paper: 4 or 2).
      rank: rank of the error's matrix for the prompt (the paper: 4).
      later: rank for each chunk of decoded tokens (the paper: 2).
      share: fraction of all numbers that are outliers (the paper: 2 %); a vector of fewer than 2 / share numbers has
        none.
      every: decoded tokens that stay exact until they fill a chunk and are quantized together (the paper's buffer: 20).

    Reference:
      GEAR, Kang et al. 2024, arXiv 2403.05527, section 4; its variant KCVT
    """
    return kv.Method(
        k=LowRankResidual(Channelwise(bits, every), ChannelOutliers(share), rank, later),
        v=LowRankResidual(Tokenwise(bits, every), TokenOutliers(share), rank, later),
    )
