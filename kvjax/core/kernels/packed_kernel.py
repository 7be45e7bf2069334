"""The program behind `packed.attend`, for Triton: one row and key/value head, every `splits`-th block of slots.

It keeps an online softmax (FlashAttention; Dao et al., 2022) over blocks of WORDS rows of words, in steps of four
tokens per word: j, j + 1 (two "planes") and, half a word on, j + per/2, j + 1 + per/2 (two "halves").

With 16-bit queries, codes never become integers. (word >> x) & mask | one leaves a float in each half of a word, and
their value is 2^bits + code, since the code stands right behind the leading one of the mantissa (8 bits are too many
for bfloat16, and come in two pieces). One instruction multiplies and adds both, and the register is what a tensor core
takes: two neighbours along the axis that it sums over. Hence the shapes of the tiles: keys [slots, (channel, half)],
values [(slot, half), channels], and a query has two rows, one per half, with zeros in the places of the other half.
Both halves are merged at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kvjax.core.attention import MASKED_LOGIT
from kvjax.core.types import Array

ROWS = 8  # queries of a program; with both halves 16 rows, the side of a tile of a tensor core
WORDS = 8  # rows of words in a block; with both planes 16 slots, another side
STEPS = 4  # steps between two updates of the online softmax: their scores wait in registers
FLOATS = {"float16": (10, 15), "bfloat16": (7, 127)}  # bits of the mantissa, bias of the exponent


@dataclasses.dataclass(frozen=True)
class Plan:
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
        """Channels in a tile of values: one group, as such a power."""
        return max(16, pl.next_power_of_2(self.v_group))

    @property
    def packed(self) -> bool:
        """Whether both halves of a word become floats at once."""
        return self.dtype.name in FLOATS

    @property
    def excess(self) -> int:
        """What a float made of a code has too much: 2^bits if packed, unless the mantissa is too short for it."""
        return 2**self.bits if self.packed and self.bits <= FLOATS[self.dtype.name][0] else 0

    @property
    def warps(self) -> int:
        """One has registers for 128 channels in 16 bits."""
        return max(1, self.width // 128) * (1 if self.packed else 4)


class Refs(NamedTuple):
    """What a program reads of its row and head: references of Pallas."""

    k_words: Array
    k_scale: Array
    k_lo: Array
    v_words: Array
    v_scale: Any
    v_lo: Any
    pos: Any


def kernel(plan: Plan, q_ref, kw, ks, kl, vw, vs, vl, pos, q_pos_ref, settled_ref, o_ref, m_ref, l_ref):
    """The program: ROWS queries, and the rest as in `packed.attend` without the axes B and K."""
    refs, row, col = Refs(kw, ks, kl, vw, vs, vl, pos), span(2 * ROWS), span(2 * plan.width)[None]
    query = _query(plan, row % ROWS)
    real = query < plan.queries
    mask = real[:, None] & (col // 2 < plan.channels) & (col % 2 == row[:, None] // ROWS)
    q = triton.load(q_ref.at[row[:, None] % ROWS, col // 2], mask=mask, other=0)
    q_pos = triton.load(q_pos_ref.at[query % plan.tokens], mask=real, other=-1)
    settled = jnp.minimum(settled_ref[()], plan.slots)
    split, splits = pl.program_id(2), pl.num_programs(2)

    def block(i, carry):
        return _block(plan, refs, q, q_pos, settled, (split + i * splits) * WORDS, carry)

    mine = pl.cdiv(jnp.maximum(pl.cdiv(settled, plan.per * WORDS) - split, 0), splits)

    def zero(*shape):
        return jnp.zeros(shape, jnp.float32)

    o = (zero(2 * ROWS, plan.chunk),) * (plan.channels // plan.v_group)
    carry = o, jnp.full((2 * ROWS,), MASKED_LOGIT, jnp.float32), zero(2 * ROWS, 2 * WORDS)
    o, m, l = lax.fori_loop(0, mine, block, carry)
    _store(plan, o, m.reshape(2, ROWS), l.sum(1).reshape(2, ROWS), o_ref, m_ref, l_ref)


def _store(plan: Plan, o, m, l, o_ref, m_ref, l_ref):
    """Merges the halves and writes them."""
    row, col = span(ROWS), span(plan.chunk)[None]
    real, top = _query(plan, row) < plan.queries, m.max(0)
    w = jnp.exp2(m - top[None])
    for c, x in enumerate(o):
        x = (x.reshape(2, ROWS, plan.chunk) * w[..., None]).sum(0)
        mask = real[:, None] & (col < plan.v_group)
        triton.store(o_ref.at[row[:, None], c * plan.v_group + col], x, mask=mask)
    triton.store(m_ref.at[row], jnp.where(top > MASKED_LOGIT / 2, top * math.log(2), MASKED_LOGIT), mask=real)
    triton.store(l_ref.at[row], (l * w).sum(0), mask=real)


def _query(plan: Plan, row):
    """Rows of this program's tile -> which queries of the head they are; a head may need several programs."""
    return pl.program_id(1) % pl.cdiv(plan.queries, ROWS) * ROWS + row


def _block(plan: Plan, refs: Refs, q, q_pos, settled, first, cross_layer):
    """The online softmax, in powers of two, over the WORDS rows of words from `first` on."""
    o, m, l = cross_layer
    upper = (span(2 * ROWS) < ROWS)[:, None]
    keys, values = _keys(plan, refs, settled, first), None
    for start in range(0, plan.per // 2, 2 * STEPS):
        steps = range(start, min(start + 2 * STEPS, plan.per // 2), 2)
        s = []
        for j in steps:
            x = dot(q, keys(j).T) * (math.log2(math.e) * plan.channels**-0.5)
            s.append(jnp.where(_visible(plan, refs, q_pos, settled, first, j), x, MASKED_LOGIT))
        values = values or _values(plan, refs, settled, first)
        top = jnp.maximum(m, functools.reduce(jnp.maximum, s).max(1))
        shrink = jnp.exp2(m - top)[:, None]
        p = [jnp.where(x > MASKED_LOGIT / 2, jnp.exp2(x - top[:, None]), 0.0) for x in s]
        o, m, l = [x * shrink for x in o], top, functools.reduce(jnp.add, p, l * shrink)
        for j, x in zip(steps, p, strict=True):
            x = _beside(jnp.where(upper, x, 0.0), jnp.where(upper, 0.0, x)).astype(plan.dtype)
            o = [y + dot(x, v) for y, v in zip(o, values(j), strict=True)]
    return tuple(o), m, l


def _visible(plan: Plan, refs: Refs, q_pos, settled, first, j):
    """bool[(half, query), (plane, word)]: what the queries see of step j."""
    col = span(2 * WORDS)
    halves = (_pos(plan, refs, settled, first + col % WORDS, j + col // WORDS + x)[1] for x in (0, plan.per // 2))
    upper = (span(2 * ROWS) < ROWS)[:, None]
    pos, t = jnp.where(upper, *(x[None] for x in halves)), q_pos[:, None]
    ok = (pos >= 0) & (pos <= t)
    return ok if plan.window is None else ok & (pos > t - plan.window)


def _pos(plan: Plan, refs: Refs, settled, word, offset):
    """Rows of words, maybe beyond the last, and places in the word -> (slots that exist, pos, -1 from settled on)."""
    slot = _clip(plan, word) * plan.per + offset
    return slot, triton.load(refs.pos.at[slot], mask=word * plan.per + offset < settled, other=-1)


def _clip(plan: Plan, word):
    """Both bounds: knowing that indices are not negative, the compiler adds constants to addresses for nothing."""
    return jnp.clip(word, 0, plan.slots // plan.per - 1)


def _keys(plan: Plan, refs: Refs, settled, first):
    """Step -> tile [(plane, word), (channel, half)]."""
    word = _clip(plan, first + span(WORDS))

    def load(ref, row, ok=None):
        return _load(ref, row, 0, plan.channels, plan.width, ok)

    words, same = load(refs.k_words, word), math.gcd(plan.k_group, plan.per)

    @functools.cache
    def affine(offset):
        slot = word * plan.per + offset
        # A half that is not settled meets the zeros of the other half's queries, and 0 * inf is NaN.
        ok = None if same == plan.per else slot < settled
        return _affine(plan, *(load(x, slot // plan.k_group, ok) for x in (refs.k_scale, refs.k_lo)))

    def plane(j):
        halves = (affine(x // same * same) for x in (j, j + plan.per // 2))
        scale, lo = (_beside(*x) for x in zip(*halves, strict=True))
        return _multiply_add(plan, _floats(plan, words, j, _beside), scale, lo)

    return lambda j: _below(plane(j), plane(j + 1))


def _values(plan: Plan, refs: Refs, settled, first):
    """Step -> tiles [(plane, word, half), channel], one per group of channels."""
    n, row, word = plan.v_group, span(4 * WORDS), _clip(plan, first + span(WORDS))
    words = [_load(refs.v_words, word, c * n, n, plan.chunk) for c in range(plan.channels // n)]

    def tiles(j):
        offset = j + row // (2 * WORDS) + row % 2 * (plan.per // 2)
        slot, pos = _pos(plan, refs, settled, first + row // 2 % WORDS, offset)
        for c, x in enumerate(words):
            # What an empty slot holds must not reach the product: its weight is 0, and 0 * inf is NaN.
            scales = (triton.load(y.at[slot, c], mask=pos >= 0, other=0) for y in (refs.v_scale, refs.v_lo))
            scale, lo = (y[:, None] for y in _affine(plan, *scales))
            codes = _below(*(_floats(plan, x, i, _in_turns) for i in (j, j + 1)))
            yield _multiply_add(plan, codes, scale, lo)

    return tiles


def _floats(plan: Plan, words, j, join):
    """[n C] words -> codes j and j + per/2 of each as floats in plan.dtype, `excess` larger, joined."""
    if not plan.packed:
        codes = ((words >> jnp.uint32(plan.bits * j + half)) & jnp.uint32(2**plan.bits - 1) for half in (0, 16))
        return join(*(x.astype(jnp.int32).astype(plan.dtype) for x in codes))
    if plan.excess:
        return join(*_halves(plan, words, plan.bits * j, plan.bits))
    n = plan.bits // 2
    low, high = (join(*_halves(plan, words, at, n)) for at in (plan.bits * j, plan.bits * j + n))

    def x(value):
        return jnp.full(low.shape, value, plan.dtype)

    return _multiply_add(plan, low, x(1), _multiply_add(plan, high, x(2**n), x(-(4**n) - 2**n)))


def _halves(plan: Plan, words, at: int, n: int):
    """2^n + n bits of each half of a word, from bit `at` on: behind the one that leads a float's mantissa."""
    mantissa, bias = FLOATS[plan.dtype.name]
    shift, mask, one = mantissa - n - at, (2**n - 1) << (mantissa - n), (bias + n) << mantissa
    x = words << jnp.uint32(shift) if shift >= 0 else words >> jnp.uint32(-shift)
    x = (x & jnp.uint32(mask * 0x10001)) | jnp.uint32(one * 0x10001)
    return [lax.bitcast_convert_type(y.astype(jnp.uint16), plan.dtype) for y in (x, x >> jnp.uint32(16))]


def _affine(plan: Plan, scale, lo):
    """Scale and lo in plan.dtype, lo making up for the excess of `_floats`."""
    scale = scale.astype(plan.dtype)
    if plan.excess:
        lo = lo.astype(jnp.float32) - scale.astype(jnp.float32) * float(plan.excess)
    return scale, lo.astype(plan.dtype)


def _multiply_add(plan: Plan, x, y, z):
    """x * y + z, rounded once; on a GPU two 16-bit floats at a time, for which Triton has only assembly."""
    y, z = (jnp.broadcast_to(a, x.shape) for a in (y, z))
    if plan.interpret or not plan.packed:
        x, y, z = (a.astype(jnp.float32) for a in (x, y, z))
        return (x * y + z).astype(plan.dtype)
    (out,) = triton.elementwise_inline_asm(
        f"fma.rn.{'f' if plan.dtype == jnp.float16 else 'bf'}16x2 $0, $1, $2, $3;",
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
    """Products of float32 in float32, not TF32."""
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _load(ref, row, start: int, n: int, width: int, ok=None):
    """Channels start..start+n-1 of the rows i32[R] -> [R width], 0 beyond, and in rows that are not ok bool[R]."""
    col = span(width)[None]
    index, mask = ref.at[row[:, None], start + col], None if n == width else col < n
    if ok is not None:
        mask = ok[:, None] if mask is None else ok[:, None] & mask
    if mask is None:
        return triton.load(index)
    return triton.load(index, mask=jnp.broadcast_to(mask, (row.shape[0], width)), other=0)


def _beside(a, b):
    """[n C], [n C] -> [n 2C], columns in turns."""
    return jnp.stack([a, b], -1).reshape(a.shape[0], -1)


def _in_turns(a, b):
    """[n C], [n C] -> [2n C], rows in turns."""
    return jnp.stack([a, b], -1).transpose(0, 2, 1).reshape(-1, a.shape[1])


def _below(a, b):
    """[n C], [n C] -> [2n C], one after the other."""
    return jnp.stack([a, b], -1).transpose(2, 0, 1).reshape(-1, a.shape[1])
