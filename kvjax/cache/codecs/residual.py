"""Codes, and what they miss: outliers as they came, and the rest of the error as a matrix of low rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from kvjax.cache.calibration.bases import sum_outer_products
from kvjax.cache.codecs.base import Codec
from kvjax.cache.codecs.chunk_quant import ChunkCodec, ChunkState
from kvjax.cache.codecs.outliers import Outliers
from kvjax.core import memory
from kvjax.core.eigen import leading_eigenvectors
from kvjax.core.types import Array, pytree
from kvjax.errors import KvjaxError


@pytree
class Mended:
    """Codes of all slots, with what is added to them."""

    coded: ChunkState
    outliers: Any
    coordinates: memory.Buffer  # [B K S r] of each token's error, r the greater of both ranks
    prompt: Array  # [B K H rank], the directions that they belong to
    later: Array  # [B K U H*later], those of each chunk; its rank is no more than its tokens


@dataclasses.dataclass(frozen=True)
class LowRankResidual(Codec):
    """X = codes of (X - S) + L + S: GEAR (Kang et al. 2024, arXiv 2403.05527, section 4), for the tokens of a chunk.

    S are the outliers, which come back as they were. L is the best matrix of a rank for the error E that the codes
    leave elsewhere, tokens times channels of a head: E is projected on its leading singular vectors, the eigenvectors
    of E^T E or, where there are fewer tokens than channels, of E E^T, so that nothing is drawn by chance. rank: for the
    prompt, all of which is one chunk; later: for each chunk of what is decoded, whose tokens stay as they came until it
    is full, as the backbone has it.
    """

    backbone: ChunkCodec
    outliers: Outliers
    rank: int = 4
    later: int = 2

    sequential_writes = True  # what a query sees in low bits depends on its own time
    supports_eviction = False  # tokens share what they are made of, and none of them can leave it

    def __post_init__(self):
        if min(self.rank, self.later) < 1:
            raise KvjaxError(f"ranks must be 1 or more, got {self.rank} and {self.later}; GEAR uses 4 and 2")

    def num_committed(self, stored: Mended, n: Array) -> Array:
        return self.backbone.num_committed(stored.coded, n)

    def encode(self, x: Array, pos: Array) -> Mended:
        B, K, S, H = x.shape
        real = jnp.broadcast_to(pos >= 0, (B, K, S))
        x = jnp.where(real[..., None], x, jnp.zeros((), x.dtype))
        out, others = self.outliers.find(x, real)
        coded = self.backbone.encode(others, pos)
        error = _error(x, self.backbone.decode(coded), real[..., None] & ~out)
        coordinates, prompt = self._factors(error, self.rank, x.dtype)
        chunks, later = self.backbone.num_chunks(S), min(self.later, self.backbone.every, H)
        return Mended(
            coded,
            self.outliers.init_state(x, out, self.backbone.every),
            memory.pack(coordinates),
            prompt,
            jnp.zeros((B, K, chunks, H * later), x.dtype),
        )

    def append(self, stored: Mended, x: Array, at: Array) -> Mended:
        """Makes codes of a chunk that is full, then holds x [B K 0|1 H] at slot at i32[B 1] in full precision."""
        due = self.backbone.is_due(stored.coded, at)
        if self.backbone.num_chunks(stored.coded.slots):
            stored = lax.cond(due.any(), lambda s: self._settle(s, due), lambda s: s, stored)
        return dataclasses.replace(stored, coded=self.backbone.append_recent(stored.coded, x, at))

    def _settle(self, stored: Mended, due: Array) -> Mended:
        """The full chunks of rows that are due bool[B] as codes, with what they miss."""
        x, at = self.backbone.recent_chunk(stored.coded), stored.coded.num_quantized[:, None]
        out, others = self.outliers.find(x, jnp.ones(x.shape[:3], bool))
        coded = self.backbone.encode_chunk(others)
        error = _error(x, self.backbone.restore(*coded), ~out)
        coordinates, directions = self._factors(error, self.later, x.dtype)
        chunk = self.backbone.chunk_index(stored.coded, at)
        place = jnp.where(due[:, None], chunk, stored.later.shape[2])  # what lies outside is dropped
        return Mended(
            self.backbone.append_chunk(stored.coded, coded, due),
            self.outliers.add(stored.outliers, x, out, at, chunk, due),
            memory.append(stored.coordinates, coordinates, at, due),
            stored.prompt,
            memory.put(stored.later, directions.reshape(*x.shape[:2], 1, -1), place),
        )

    def decode(self, stored: Mended) -> Array:
        """[B K S H] in the dtype that came in."""
        rows = self.backbone.decode(stored.coded)
        slot = jnp.arange(rows.shape[2], dtype=jnp.int32)[None, None]
        return self._mended(stored, rows, jnp.broadcast_to(slot, rows.shape[:3]))

    def gather(self, stored: Mended, idx: Array) -> Array:
        return self._mended(stored, self.backbone.gather(stored.coded, idx), idx)

    def _mended(self, stored: Mended, rows: Array, slot: Array) -> Array:
        """Rows [B K n H] as the codes of slots i32[B K n] have them, with what they miss."""
        whole = (rows.astype(jnp.float32) + self._low_rank(stored, slot)).astype(rows.dtype)
        whole = self.outliers.insert(stored.outliers, whole, slot)
        return jnp.where((slot < stored.coded.num_quantized[:, None, None])[..., None], whole, rows)

    def _low_rank(self, stored: Mended, slot: Array) -> Array:
        """Of these slots, the rows of L: f32[B K n H]."""
        coordinates = memory.gather_tokens(stored.coordinates, slot).astype(jnp.float32)
        prompt = _expanded(coordinates, stored.prompt[:, :, None])
        if not stored.later.shape[2]:
            return prompt
        chunk = self.backbone.chunk_index(stored.coded, slot)
        later = memory.take(stored.later, jnp.clip(chunk, 0, stored.later.shape[2] - 1))
        later = _expanded(coordinates, later.reshape(*slot.shape, stored.prompt.shape[2], -1))
        return jnp.where((chunk < 0)[..., None], prompt, later)

    def _factors(self, error: Array, rank: int, dtype: Any) -> tuple[Array, Array]:
        """Errors f32[B K n H] -> coordinates [B K n r], and the directions that they belong to [B K H rank].

        Coordinates have zeros up to the greater rank.
        """
        n, H = error.shape[2:]
        across = error.swapaxes(2, 3)
        if n < H:
            coordinates = leading_eigenvectors(sum_outer_products(across), min(rank, n)).astype(dtype)
            directions = _product(across, coordinates).astype(dtype)
        else:
            directions = leading_eigenvectors(sum_outer_products(error), min(rank, H)).astype(dtype)
            coordinates = _product(error, directions).astype(dtype)
        width = min(max(self.rank, self.later), H)
        return jnp.pad(coordinates, [(0, 0)] * 3 + [(0, width - coordinates.shape[3])]), directions


def _error(x: Array, coded: Array, counts: Array) -> Array:
    """What x [B K n H] is beyond its codes, 0 where nothing counts: f32."""
    return jnp.where(counts, x.astype(jnp.float32) - coded.astype(jnp.float32), 0.0)


def _product(x: Array, y: Array) -> Array:
    """f32[B K n m] times [B K m r], in full float32."""
    return jnp.matmul(x, y.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def _expanded(coordinates: Array, directions: Array) -> Array:
    """Coordinates f32[B K n r], of each token along its first directions [B K 1|n H r'] -> f32[B K n H]."""
    first = coordinates[..., None, : directions.shape[4]]
    return (first * directions.astype(jnp.float32)).sum(-1)
