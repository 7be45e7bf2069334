"""Codes, and outliers as they came: dense-and-sparse quantisation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from kvjax.cache.codecs.base import Codec
from kvjax.cache.codecs.chunk_quant import ChunkCodec, ChunkState
from kvjax.cache.codecs.outliers import Outliers
from kvjax.core.types import Array, pytree


@pytree
class Both:
    """Codes of all slots, and the outliers beside them."""

    codes: ChunkState
    outliers: Any


@dataclasses.dataclass(frozen=True)
class DenseAndSparse(Codec):
    """X = codes of (X - S) + S, where S are the outliers of X (KVQuant, Hooper et al. 2024, arXiv 2401.18079).

    What is far from the rest widens no range, and comes back as it was. pre_rope: whether it holds keys without their
    rotation, whose channels keep to ranges of their own.
    """

    codes: ChunkCodec
    outliers: Outliers
    pre_rope: bool = False

    sequential_writes = True  # what a query sees in low bits depends on its own time
    supports_eviction = False  # tokens share what they are made of, and none of them can leave it

    def num_committed(self, stored: Both, n: Array) -> Array:
        return self.codes.num_committed(stored.codes, n)

    def encode(self, x: Array, pos: Array) -> Both:
        real = jnp.broadcast_to(pos >= 0, x.shape[:3])
        x = jnp.where(real[..., None], x, jnp.zeros((), x.dtype))
        out, others = self.outliers.find(x, real)
        return Both(self.codes.encode(others, pos), self.outliers.init_state(x, out, self.codes.every))

    def append(self, stored: Both, x: Array, at: Array) -> Both:
        """Makes codes of a chunk that is full, then holds x [B K 0|1 H] at slot at i32[B 1] in full precision."""
        due = self.codes.is_due(stored.codes, at)
        if self.codes.num_chunks(self._slots(stored)):
            stored = lax.cond(due.any(), lambda s: self._settled(s, due), lambda s: s, stored)
        return dataclasses.replace(stored, codes=self.codes.append_recent(stored.codes, x, at))

    def _settled(self, stored: Both, due: Array) -> Both:
        """With the full chunks of the rows that are due bool[B] as codes and outliers."""
        x, at = self.codes.recent_chunk(stored.codes), stored.codes.num_quantized[:, None]
        out, others = self.outliers.find(x, jnp.ones(x.shape[:3], bool))
        chunk = self.codes.chunk_index(stored.codes, at)
        return Both(
            self.codes.append_chunk(stored.codes, self.codes.encode_chunk(others), due),
            self.outliers.add(stored.outliers, x, out, at, chunk, due),
        )

    def decode(self, stored: Both) -> Array:
        """[B K S H] in the dtype that came in."""
        rows = self.codes.decode(stored.codes)
        slot = jnp.arange(rows.shape[2], dtype=jnp.int32)[None, None]
        return self._whole(stored, rows, jnp.broadcast_to(slot, rows.shape[:3]))

    def gather(self, stored: Both, idx: Array) -> Array:
        return self._whole(stored, self.codes.gather(stored.codes, idx), idx)

    def _whole(self, stored: Both, rows: Array, slot: Array) -> Array:
        """Rows [B K n H] of slots i32[B K n] with their outliers, which those that are no codes yet have themselves."""
        whole = self.outliers.insert(stored.outliers, rows, slot)
        return jnp.where((slot < stored.codes.num_quantized[:, None, None])[..., None], whole, rows)

    def _slots(self, stored: Both) -> int:
        return stored.codes.codes.data.shape[2]
