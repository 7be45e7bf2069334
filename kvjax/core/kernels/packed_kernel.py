"""The Triton program of `packed_attention.attend`: one sequence and key/value head, every `splits`-th block of slots.

It keeps an online softmax (FlashAttention; Dao et al., 2022) over blocks of `WORD_ROWS` rows of words, in steps of four
tokens per word: j, j + 1 (two "planes") and, half a word on, j + per/2, j + 1 + per/2 (two "halves").

With 16-bit queries, codes never become integers. (word >> x) & mask | one leaves a float in each half of a word, and
their value is 2^bits + code, since the code stands right behind the leading one of the mantissa (8 bits are too many
for bfloat16, and come in two parts). One instruction multiplies and adds both, and the register is what a tensor core
takes: two neighbors along the axis that it sums over. Hence the shapes of the tiles: keys [slots, (channel, half)],
values [(slot, half), channels], and a query has two rows, one per half, with zeros in the places of the other half.
Both halves are merged at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kvjax.core.attention import MASKED_LOGIT
from kvjax.core.types import Array

QUERY_ROWS = 8  # queries of a program; with both halves 16 rows, the side of a tile of a tensor core
WORD_ROWS = 8  # rows of words in a block; with both planes 16 slots, another side
UPDATE_STEPS = 4  # steps between two updates of the online softmax, while their scores wait in registers
FLOATS = {"float16": (10, 15), "bfloat16": (7, 127)}  # bits of the mantissa, bias of the exponent


@dataclasses.dataclass(frozen=True)
class KernelTiling:
    """The static numbers of the kernel."""

    bits: int
    slots: int
    queries: int  # of a key/value head: G * T
    tokens: int  # T
    channels: int  # H
    k_group: int  # slots that share a scale
    v_group: int  # channels that share a scale
    dtype: jnp.dtype  # of q, and of all operands
    window: int | None
    interpret: bool

    @property
    def per(self) -> int:
        """Slots in a word."""
        return 32 // self.bits

    @property
    def width(self) -> int:
        """Channels in a tile of keys: Triton knows only powers of two."""
        return pl.next_power_of_2(self.channels)

    @property
    def chunk(self) -> int:
        """Channels in a tile of values: one group, rounded up to such a power."""
        return max(16, pl.next_power_of_2(self.v_group))

    @property
    def is_packed(self) -> bool:
        """Whether both halves of a word become floats at once."""
        return self.dtype.name in FLOATS

    @property
    def excess(self) -> int:
        """The excess of a float made from a code: 2^bits if `is_packed`, unless the mantissa is too short."""
        return 2**self.bits if self.is_packed and self.bits <= FLOATS[self.dtype.name][0] else 0


@dataclasses.dataclass(frozen=True)
class _Head:
    """The codes of the program's sequence and head, as references of Pallas, and how many of its slots are codes."""

    tiling: KernelTiling
    num_quantized: Array
    k_words: Any
    k_scale: Any
    k_lo: Any
    v_words: Any
    v_scale: Any
    v_lo: Any
    pos: Any

    def clip_word(self, word):
        # Both bounds: knowing that indices are not negative, the compiler would add constants to addresses for nothing.
        return jnp.clip(word, 0, self.tiling.slots // self.tiling.per - 1)

    def load_pos(self, word, offset):
        """Rows of words, maybe beyond the last, and places in the word -> slots that exist, and pos, -1 if no code."""
        tiling = self.tiling
        slot = self.clip_word(word) * tiling.per + offset
        is_quantized = word * tiling.per + offset < self.num_quantized
        return slot, triton.load(self.pos.at[slot], mask=is_quantized, other=-1)

    def is_visible(self, q_pos, first, j):
        """bool[(half, query), (plane, word)]: whether each query sees each token of step j."""
        tiling, col = self.tiling, span(2 * WORD_ROWS)
        offsets = (j + col // WORD_ROWS + half for half in (0, tiling.per // 2))
        halves = (self.load_pos(first + col % WORD_ROWS, offset)[1] for offset in offsets)
        is_upper = (span(2 * QUERY_ROWS) < QUERY_ROWS)[:, None]
        pos, t = jnp.where(is_upper, *(x[None] for x in halves)), q_pos[:, None]
        ok = (pos >= 0) & (pos <= t)
        return ok if tiling.window is None else ok & (pos > t - tiling.window)

    def keys(self, first):
        """Returns a function from a step to its tile of keys [(plane, word), (channel, half)]."""
        tiling, word = self.tiling, self.clip_word(first + span(WORD_ROWS))
        load = functools.partial(_load, channels=(0, tiling.channels), width=tiling.width)
        words, same = load(self.k_words, word), math.gcd(tiling.k_group, tiling.per)

        @functools.cache  # the tokens of a word that are in one group share scale and lo
        def scale_and_lo(offset):
            slot = word * tiling.per + offset
            # A half without codes meets the zeros of the other half's queries, and 0 * inf is NaN.
            ok = None if same == tiling.per else slot < self.num_quantized
            return _adjust_lo(tiling, *(load(x, slot // tiling.k_group, ok=ok) for x in (self.k_scale, self.k_lo)))

        def plane(j):
            halves = (scale_and_lo(x // same * same) for x in (j, j + tiling.per // 2))
            scale, lo = (_interleave_columns(*x) for x in zip(*halves, strict=True))
            return _multiply_add(tiling, _codes_to_floats(tiling, words, j, _interleave_columns), scale, lo)

        return lambda j: _stack_rows(plane(j), plane(j + 1))

    def values(self, first):
        """Returns a function from a step to its tiles of values [(plane, word, half), channel], one per group."""
        tiling = self.tiling
        n, row, word = tiling.v_group, span(4 * WORD_ROWS), self.clip_word(first + span(WORD_ROWS))
        words = [_load(self.v_words, word, (c * n, n), tiling.chunk) for c in range(tiling.channels // n)]

        def tiles(j):
            offset = j + row // (2 * WORD_ROWS) + row % 2 * (tiling.per // 2)
            slot, pos = self.load_pos(first + row // 2 % WORD_ROWS, offset)
            for c, x in enumerate(words):
                # What an empty slot holds must not reach the product: its weight is 0, and 0 * inf is NaN.
                loaded = (triton.load(y.at[slot, c], mask=pos >= 0, other=0) for y in (self.v_scale, self.v_lo))
                scale, lo = (y[:, None] for y in _adjust_lo(tiling, *loaded))
                codes = _stack_rows(*(_codes_to_floats(tiling, x, i, _interleave_rows) for i in (j, j + 1)))
                yield _multiply_add(tiling, codes, scale, lo)

        return tiles


def kernel(tiling: KernelTiling, q_ref, *refs):
    """The program: `QUERY_ROWS` queries; other references as in `packed_attention.attend`, without axes B and K."""
    *codes_and_pos, q_pos_ref, num_quantized_ref, o_ref, m_ref, l_ref = refs
    num_quantized = jnp.minimum(num_quantized_ref[()], tiling.slots)
    head = _Head(tiling, num_quantized, *codes_and_pos)
    row, col = span(2 * QUERY_ROWS), span(2 * tiling.width)[None]
    query = _query_index(tiling, row % QUERY_ROWS)
    real = query < tiling.queries
    # Each query has two rows, with zeros in every second channel: the places of the other half of the words.
    mask = real[:, None] & (col // 2 < tiling.channels) & (col % 2 == row[:, None] // QUERY_ROWS)
    q = triton.load(q_ref.at[row[:, None] % QUERY_ROWS, col // 2], mask=mask, other=0)
    q_pos = triton.load(q_pos_ref.at[query % tiling.tokens], mask=real, other=-1)
    split, splits = pl.program_id(2), pl.num_programs(2)
    num_blocks = pl.cdiv(jnp.maximum(pl.cdiv(num_quantized, tiling.per * WORD_ROWS) - split, 0), splits)
    o = (jnp.zeros((2 * QUERY_ROWS, tiling.chunk), jnp.float32),) * (tiling.channels // tiling.v_group)
    m, l = (
        jnp.full((2 * QUERY_ROWS,), MASKED_LOGIT, jnp.float32),
        jnp.zeros((2 * QUERY_ROWS, 2 * WORD_ROWS), jnp.float32),
    )
    o, m, l = lax.fori_loop(
        0,
        num_blocks,
        lambda i, carry: _attend_block(head, q, q_pos, (split + i * splits) * WORD_ROWS, carry),
        (o, m, l),
    )

    # Merges both halves, and leaves the powers of two.
    row, col = span(QUERY_ROWS), span(tiling.chunk)[None]
    m, l = m.reshape(2, QUERY_ROWS), l.sum(1).reshape(2, QUERY_ROWS)
    real, top = _query_index(tiling, row) < tiling.queries, m.max(0)
    w = jnp.exp2(m - top[None])
    for c, x in enumerate(o):
        x = (x.reshape(2, QUERY_ROWS, tiling.chunk) * w[..., None]).sum(0)
        mask = real[:, None] & (col < tiling.v_group)
        triton.store(o_ref.at[row[:, None], c * tiling.v_group + col], x, mask=mask)
    triton.store(m_ref.at[row], jnp.where(top > MASKED_LOGIT / 2, top * math.log(2), MASKED_LOGIT), mask=real)
    triton.store(l_ref.at[row], (l * w).sum(0), mask=real)


def _query_index(tiling: KernelTiling, row):
    """Rows of this program's tile -> queries of the head; a head may need several programs."""
    return pl.program_id(1) % pl.cdiv(tiling.queries, QUERY_ROWS) * QUERY_ROWS + row


def _attend_block(head: _Head, q, q_pos, first, carry):
    """The online softmax, in powers of two, over the `WORD_ROWS` rows of words from `first` on."""
    tiling, (o, m, l) = head.tiling, carry
    is_upper = (span(2 * QUERY_ROWS) < QUERY_ROWS)[:, None]
    keys, values = head.keys(first), None
    for start in range(0, tiling.per // 2, 2 * UPDATE_STEPS):
        steps = range(start, min(start + 2 * UPDATE_STEPS, tiling.per // 2), 2)
        s = []
        for j in steps:
            x = dot(q, keys(j).T) * (math.log2(math.e) * tiling.channels**-0.5)
            s.append(jnp.where(head.is_visible(q_pos, first, j), x, MASKED_LOGIT))
        values = values or head.values(first)  # once for all steps, after the first scores
        top = jnp.maximum(m, functools.reduce(jnp.maximum, s).max(1))
        shrink = jnp.exp2(m - top)[:, None]
        p = [jnp.where(x > MASKED_LOGIT / 2, jnp.exp2(x - top[:, None]), 0.0) for x in s]
        o, m, l = [x * shrink for x in o], top, functools.reduce(jnp.add, p, l * shrink)
        for j, x in zip(steps, p, strict=True):
            x = _interleave_columns(jnp.where(is_upper, x, 0.0), jnp.where(is_upper, 0.0, x)).astype(tiling.dtype)
            o = [y + dot(x, v) for y, v in zip(o, values(j), strict=True)]
    return tuple(o), m, l


def _codes_to_floats(tiling: KernelTiling, words, j, join):
    """Codes j and j + per/2 of words [n C] as floats in tiling.dtype, `excess` too large, combined by `join`."""
    if not tiling.is_packed:
        codes = ((words >> jnp.uint32(tiling.bits * j + half)) & jnp.uint32(2**tiling.bits - 1) for half in (0, 16))
        return join(*(x.astype(jnp.int32).astype(tiling.dtype) for x in codes))
    if tiling.excess:
        return join(*_half_floats(tiling, words, tiling.bits * j, tiling.bits))
    # The code is longer than the mantissa: the low and the high half of its bits become floats, and are added up.
    n = tiling.bits // 2
    low, high = (join(*_half_floats(tiling, words, at, n)) for at in (tiling.bits * j, tiling.bits * j + n))
    one, scale, lo = (jnp.full(low.shape, x, tiling.dtype) for x in (1, 2**n, -(4**n) - 2**n))
    return _multiply_add(tiling, low, one, _multiply_add(tiling, high, scale, lo))


def _half_floats(tiling: KernelTiling, words, at: int, n: int):
    """2^n + the n bits from `at` on, of each half of a word: they stand behind a float's leading one."""
    mantissa, bias = FLOATS[tiling.dtype.name]
    shift, mask, one = mantissa - n - at, (2**n - 1) << (mantissa - n), (bias + n) << mantissa
    x = words << jnp.uint32(shift) if shift >= 0 else words >> jnp.uint32(-shift)
    x = (x & jnp.uint32(mask * 0x10001)) | jnp.uint32(one * 0x10001)
    return [lax.bitcast_convert_type(y.astype(jnp.uint16), tiling.dtype) for y in (x, x >> jnp.uint32(16))]


def _adjust_lo(tiling: KernelTiling, scale, lo):
    """Scale and lo in tiling.dtype, lo less what the excess of `_codes_to_floats` adds."""
    scale = scale.astype(tiling.dtype)
    if tiling.excess:
        lo = lo.astype(jnp.float32) - scale.astype(jnp.float32) * float(tiling.excess)
    return scale, lo.astype(tiling.dtype)


def _multiply_add(tiling: KernelTiling, x, y, z):
    """x * y + z, rounded once; on a GPU two 16-bit floats at a time, for which Triton has only assembly."""
    y, z = (jnp.broadcast_to(a, x.shape) for a in (y, z))
    if tiling.interpret or not tiling.is_packed:
        x, y, z = (a.astype(jnp.float32) for a in (x, y, z))
        return (x * y + z).astype(tiling.dtype)
    (out,) = triton.elementwise_inline_asm(
        f"fma.rn.{'f' if tiling.dtype == jnp.float16 else 'bf'}16x2 $0, $1, $2, $3;",
        args=[x, y, z],
        constraints="=r,r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return out


def span(n: int) -> Array:
    """0 .. n - 1."""
    return jnp.arange(n, dtype=jnp.int32)


def dot(a, b):
    """Matrix product that sums in float32; float32 operands are not rounded to TF32."""
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _load(ref, row, channels: tuple[int, int], width: int, ok=None):
    """Loads (first, number of) channels of rows i32[R]: [R width], 0 beyond, and in rows that are not ok bool[R]."""
    (start, n), col = channels, span(width)[None]
    index, mask = ref.at[row[:, None], start + col], None if n == width else col < n
    if ok is not None:
        mask = ok[:, None] if mask is None else ok[:, None] & mask
    if mask is None:
        return triton.load(index)
    return triton.load(index, mask=jnp.broadcast_to(mask, (row.shape[0], width)), other=0)


# Triton joins arrays only along a new last axis, which transposing then moves where it belongs.
def _interleave_columns(a, b):
    """[n C], [n C] -> [n 2C]."""
    return jnp.stack([a, b], -1).reshape(a.shape[0], -1)


def _interleave_rows(a, b):
    """[n C], [n C] -> [2n C]."""
    return jnp.stack([a, b], -1).transpose(0, 2, 1).reshape(-1, a.shape[1])


def _stack_rows(a, b):
    """[n C], [n C] -> [2n C], all rows of a first."""
    return jnp.stack([a, b], -1).transpose(2, 0, 1).reshape(-1, a.shape[1])
