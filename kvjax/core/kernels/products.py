"""The two products of decode attention, each straight from packed codes: kernels for NVIDIA GPUs.

`packed.attend` is both in one kernel, and faster. These are for whoever must see the weights between the two. Codes are
as described in `packed`, but a number's scale and lo may belong to a group of slots or of channels in either product:
scale and lo are [B K S/g H/h], where g slots and h channels share one.
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

from kvjax.core.kernels.packed import PROGRAMS, Codes
from kvjax.core.kernels.packed_kernel import dot, span
from kvjax.core.types import Array

QUERIES = 64  # of a key/value head that one program takes at most
WORDS = 16  # rows of words in a block, the side of a tile of a tensor core


def fits(q: Array, codes: Codes) -> bool:
    """Whether the kernels serve queries or weights [B K G T ...] and these codes."""
    few = q.shape[2] * q.shape[3] <= QUERIES
    return few and codes.words.size > 0 and codes.words.shape[3] <= 256


def scores(q: Array, k: Codes, *, bits: int, interpret: bool = False) -> Array:
    """q [B K G T H] against all keys -> f32[B K G T S], over the root of H; operands in q's dtype, sums in float32.

    Keys of slots that hold none must be finite. `interpret` runs the kernel on any device.
    """
    plan = _plan(q, k, bits, q.dtype)
    B, K, G, T, H = q.shape
    out = pl.pallas_call(
        functools.partial(_scores, plan),
        grid=(B, K, pl.cdiv(plan.rows, WORDS)),
        in_specs=[_whole(x) for x in (q.reshape(B, K, G * T, H), *k)],
        out_specs=_each((G * T, plan.slots)),
        out_shape=jax.ShapeDtypeStruct((B, K, G * T, plan.slots), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="packed_scores",
    )(q.reshape(B, K, G * T, H), *k)
    return out.reshape(B, K, G, T, plan.slots)


def mix(p: Array, v: Codes, dtype: jnp.dtype, *, bits: int, interpret: bool = False) -> Array:
    """Weights f32[B K G T S] over all values -> f32[B K G T H]; operands in `dtype`, sums in float32.

    Values of slots that hold none must be finite. `interpret` runs the kernel on any device.
    """
    plan = _plan(p, v, bits, dtype)
    B, K, G, T, S = p.shape
    splits = max(1, min(pl.cdiv(plan.rows, WORDS), PROGRAMS // (B * K)))
    out = pl.pallas_call(
        functools.partial(_mix, plan),
        grid=(B, K, splits),
        in_specs=[_whole(x) for x in (p.reshape(B, K, G * T, S), *v)],
        out_specs=pl.BlockSpec((None, None, None, G * T, plan.channels), lambda b, k, i: (b, k, i, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((B, K, splits, G * T, plan.channels), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="packed_mix",
    )(p.reshape(B, K, G * T, S), *v)
    return out.sum(2).reshape(B, K, G, T, plan.channels)


@dataclasses.dataclass(frozen=True)
class Plan:
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
    def slots(self) -> int:
        """Of all words."""
        return self.rows * self.per

    @property
    def width(self) -> int:
        """Channels of a tile: Triton knows only powers of two."""
        return max(16, pl.next_power_of_2(self.channels))

    @property
    def height(self) -> int:
        """Queries of a tile."""
        return max(16, pl.next_power_of_2(self.queries))


def _plan(q: Array, codes: Codes, bits: int, dtype: jnp.dtype) -> Plan:
    rows, channels = codes.words.shape[2:]
    slot_group = rows * (32 // bits) // codes.scale.shape[2]
    return Plan(bits, rows, q.shape[2] * q.shape[3], channels, slot_group, channels // codes.scale.shape[3], dtype)


def _each(shape: tuple[int, ...]) -> pl.BlockSpec:
    """All of a row and key/value head."""
    return pl.BlockSpec((None, None, *shape), lambda b, k, i: (b, k, *(0 for _ in shape)))


def _whole(x: Array) -> pl.BlockSpec:
    return _each(x.shape[2:])


def _scores(plan: Plan, q_ref, words_ref, scale_ref, lo_ref, out_ref):
    """One program: the scores of WORDS rows of words."""
    query, channel = span(plan.height)[:, None], span(plan.width)[None]
    inside = (query < plan.queries) & (channel < plan.channels)
    q = triton.load(q_ref.at[query, channel], mask=inside, other=0).astype(plan.dtype)
    block = _Block(plan, (words_ref, scale_ref, lo_ref), pl.program_id(2) * WORDS)
    for j in range(plan.per):
        s = dot(q, block.numbers(j).T) * plan.channels**-0.5
        slot = block.word * plan.per + j
        triton.store(out_ref.at[query, slot[None]], s, mask=(query < plan.queries) & (block.word < plan.rows)[None])


def _mix(plan: Plan, p_ref, words_ref, scale_ref, lo_ref, out_ref):
    """One program: the mixture of every `splits`-th block of WORDS rows of words."""
    query, channel = span(plan.height)[:, None], span(plan.width)[None]
    split, splits = pl.program_id(2), pl.num_programs(2)

    def add(i, out):
        block = _Block(plan, (words_ref, scale_ref, lo_ref), (split + i * splits) * WORDS)
        mask = (query < plan.queries) & (block.word < plan.rows)[None]
        for j in range(plan.per):
            slot = block.word * plan.per + j
            p = triton.load(p_ref.at[query, slot[None]], mask=mask, other=0).astype(plan.dtype)
            out = out + dot(p, block.numbers(j))
        return out

    mine = pl.cdiv(jnp.maximum(pl.cdiv(plan.rows, WORDS) - split, 0), splits)
    out = lax.fori_loop(0, mine, add, jnp.zeros((plan.height, plan.width), jnp.float32))
    inside = (query < plan.queries) & (channel < plan.channels)
    triton.store(out_ref.at[query, channel], out, mask=inside)


class _Block:
    """WORDS rows of words from `first` on, some of them maybe behind the last."""

    def __init__(self, plan: Plan, refs, first):
        self.plan, self.word = plan, first + span(WORDS)
        self._words_ref, self._scale_ref, self._lo_ref = refs
        self._channel = span(plan.width)[None]
        self._mask = (self.word < plan.rows)[:, None] & (self._channel < plan.channels)
        self._words = triton.load(self._words_ref.at[self.word[:, None], self._channel], mask=self._mask, other=0)
        self._known: dict[int, tuple] = {}

    def numbers(self, j: int):
        """Token j of each word, dequantised, [WORDS width]."""
        scale, lo = self._affine(j)
        codes = (self._words >> jnp.uint32(self.plan.bits * j)) & jnp.uint32(2**self.plan.bits - 1)
        return (codes.astype(jnp.int32).astype(jnp.float32) * scale + lo).astype(self.plan.dtype)

    def _affine(self, j: int):
        """Scale and lo of token j of each word, which those of its group share."""
        shared = math.gcd(self.plan.slot_group, self.plan.per)
        first = j // shared * shared
        if first not in self._known:
            group = (self.word * self.plan.per + first)[:, None] // self.plan.slot_group
            at = group, self._channel // self.plan.channel_group
            self._known[first] = tuple(
                triton.load(ref.at[at], mask=self._mask, other=0).astype(jnp.float32)
                for ref in (self._scale_ref, self._lo_ref)
            )
        return self._known[first]
