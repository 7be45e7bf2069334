"""The two products of decode attention, each straight from packed codes: kernels for NVIDIA GPUs.

`packed_attention.attend` computes both in one kernel, and is faster. These serve callers that need the weights in
between. Codes are as described there, but in either product slots or channels may share a number's scale and lo: both
are [B K S/g H/h], where g slots and h channels share one.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Float32

from kvjax.core.kernels.packed_attention import NUM_PROGRAMS, PackedCodes
from kvjax.core.kernels.packed_kernel import dot, span
from kvjax.core.types import Array

MAX_QUERIES = 64  # of a key/value head, for one program
WORD_ROWS = 16  # rows of words in a block, the side of a tile of a tensor core


def fits(x: Array | jax.ShapeDtypeStruct, codes: PackedCodes) -> bool:
    """Whether the kernels serve queries or weights x [B K G T ...] and these codes."""
    is_few = x.shape[2] * x.shape[3] <= MAX_QUERIES
    return is_few and codes.words.size > 0 and codes.words.shape[3] <= 256


def scores(
    q: Float[Array, "B K G T H"], k: PackedCodes, *, bits: int, interpret: bool = False
) -> Float32[Array, "B K G T S"]:
    """Computes scaled dot products of queries and all keys; operands in q's dtype, sums in float32.

    Keys in empty slots must be finite. `interpret` runs the kernel on any device.
    """
    tiling = tiling_of(q, k, bits, q.dtype)
    (B, K, G, T, H), S = q.shape, tiling.rows * tiling.per
    out = pl.pallas_call(
        functools.partial(_scores_kernel, tiling),
        grid=(B, K, pl.cdiv(tiling.rows, WORD_ROWS)),
        in_specs=[_head_spec(x.shape[2:]) for x in (q.reshape(B, K, G * T, H), *k)],
        out_specs=_head_spec((G * T, S)),
        out_shape=jax.ShapeDtypeStruct((B, K, G * T, S), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="packed_scores",
    )(q.reshape(B, K, G * T, H), *k)
    return out.reshape(B, K, G, T, S)


def mix(
    p: Float32[Array, "B K G T S"], v: PackedCodes, dtype: jnp.dtype, *, bits: int, interpret: bool = False
) -> Float32[Array, "B K G T H"]:
    """Sums all values by weights; operands in `dtype`, sums in float32.

    Values in empty slots must be finite. `interpret` runs the kernel on any device.
    """
    tiling = tiling_of(p, v, bits, dtype)
    B, K, G, T, S = p.shape
    # The sum runs over slots, so that without a split one program would read a whole head; scores need none.
    splits = max(1, min(pl.cdiv(tiling.rows, WORD_ROWS), NUM_PROGRAMS // (B * K)))
    out = pl.pallas_call(
        functools.partial(_mix_kernel, tiling),
        grid=(B, K, splits),
        in_specs=[_head_spec(x.shape[2:]) for x in (p.reshape(B, K, G * T, S), *v)],
        out_specs=pl.BlockSpec((None, None, None, G * T, tiling.channels), lambda b, k, i: (b, k, i, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((B, K, splits, G * T, tiling.channels), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="packed_mix",
    )(p.reshape(B, K, G * T, S), *v)
    return out.sum(2).reshape(B, K, G, T, tiling.channels)


@dataclasses.dataclass(frozen=True)
class ProductTiling:
    """The static numbers of both kernels."""

    bits: int
    rows: int  # of words
    queries: int  # of a key/value head: G * T
    channels: int  # H
    slot_group: int  # slots that share a scale
    channel_group: int  # channels that share a scale
    dtype: jnp.dtype  # of all operands

    @property
    def per(self) -> int:
        """Slots in a word."""
        return 32 // self.bits

    @property
    def width(self) -> int:
        """Channels of a tile: Triton knows only powers of two, and products of 16 and more."""
        return max(16, pl.next_power_of_2(self.channels))

    @property
    def height(self) -> int:
        """Queries of a tile."""
        return max(16, pl.next_power_of_2(self.queries))


def tiling_of(x: Array, codes: PackedCodes, bits: int, dtype: jnp.dtype) -> ProductTiling:
    """The numbers of a kernel for queries or weights x [B K G T ...] and these codes; operands are of `dtype`."""
    rows, channels = codes.words.shape[2:]
    num_queries = x.shape[2] * x.shape[3]
    slot_group = rows * (32 // bits) // codes.scale.shape[2]
    channel_group = channels // codes.scale.shape[3]
    return ProductTiling(bits, rows, num_queries, channels, slot_group, channel_group, dtype)


def _head_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
    """All of one sequence and key/value head."""
    return pl.BlockSpec((None, None, *shape), lambda b, k, i: (b, k, *(0 for _ in shape)))


def _scores_kernel(tiling: ProductTiling, q_ref, words_ref, scale_ref, lo_ref, out_ref):
    """One program: the scores of `WORD_ROWS` rows of words."""
    query, channel = span(tiling.height)[:, None], span(tiling.width)[None]
    inside = (query < tiling.queries) & (channel < tiling.channels)
    q = triton.load(q_ref.at[query, channel], mask=inside, other=0).astype(tiling.dtype)
    block = WordBlock(tiling, (words_ref, scale_ref, lo_ref), pl.program_id(2) * WORD_ROWS)
    for j in range(tiling.per):
        s = dot(q, block.dequantize(j).T) * tiling.channels**-0.5
        slot = block.word * tiling.per + j
        triton.store(out_ref.at[query, slot[None]], s, mask=(query < tiling.queries) & (block.word < tiling.rows)[None])


def _mix_kernel(tiling: ProductTiling, p_ref, words_ref, scale_ref, lo_ref, out_ref):
    """One program: the weighted sum over every `splits`-th block of `WORD_ROWS` rows of words."""
    query, channel = span(tiling.height)[:, None], span(tiling.width)[None]
    split, splits = pl.program_id(2), pl.num_programs(2)

    def add_block(i, out):
        block = WordBlock(tiling, (words_ref, scale_ref, lo_ref), (split + i * splits) * WORD_ROWS)
        mask = (query < tiling.queries) & (block.word < tiling.rows)[None]
        for j in range(tiling.per):
            slot = block.word * tiling.per + j
            p = triton.load(p_ref.at[query, slot[None]], mask=mask, other=0).astype(tiling.dtype)
            out = out + dot(p, block.dequantize(j))
        return out

    num_blocks = pl.cdiv(jnp.maximum(pl.cdiv(tiling.rows, WORD_ROWS) - split, 0), splits)
    out = lax.fori_loop(0, num_blocks, add_block, jnp.zeros((tiling.height, tiling.width), jnp.float32))
    inside = (query < tiling.queries) & (channel < tiling.channels)
    triton.store(out_ref.at[query, channel], out, mask=inside)


class WordBlock:
    """`WORD_ROWS` rows of words from `first` on, some of them maybe beyond the last."""

    def __init__(self, tiling: ProductTiling, refs, first):
        self.tiling, self.word = tiling, first + span(WORD_ROWS)
        words_ref, self._scale_ref, self._lo_ref = refs
        self._channel = span(tiling.width)[None]
        self._mask = (self.word < tiling.rows)[:, None] & (self._channel < tiling.channels)
        self._words = triton.load(words_ref.at[self.word[:, None], self._channel], mask=self._mask, other=0)
        self._scale_and_lo: dict[int, tuple] = {}

    def dequantize(self, j: int):
        """Token j of each word, [WORD_ROWS width]."""
        # The tokens of a word that are in one group share scale and lo, which are loaded with the first of them.
        shared = math.gcd(self.tiling.slot_group, self.tiling.per)
        first = j // shared * shared
        if first not in self._scale_and_lo:
            group = (self.word * self.tiling.per + first)[:, None] // self.tiling.slot_group
            index = group, self._channel // self.tiling.channel_group
            self._scale_and_lo[first] = tuple(
                triton.load(ref.at[index], mask=self._mask, other=0).astype(jnp.float32)
                for ref in (self._scale_ref, self._lo_ref)
            )
        scale, lo = self._scale_and_lo[first]
        codes = (self._words >> jnp.uint32(self.tiling.bits * j)) & jnp.uint32(2**self.tiling.bits - 1)
        return (codes.astype(jnp.int32).astype(jnp.float32) * scale + lo).astype(self.tiling.dtype)
