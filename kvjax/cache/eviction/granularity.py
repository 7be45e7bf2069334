"""Which prompt tokens stay: the highest scores of each row and head between its first and its last tokens.

A row's tokens, in order: its sinks; whole units of c consecutive tokens, counted from the first token after the sinks;
a remainder of fewer than c tokens; its recents. Sinks and recents always stay. The remainder is never scored: like the
page that a paged cache is writing it stays with the recents, paid for by the budget (its newest tokens, where the
budget is shorter). Of the units stay as many as fit whole into what the budget has left. So a row keeps

    kept = sinks + recents + remainder + c * floor((keep - sinks - recents - remainder) / c)

tokens of every head, and all of them if it has no more than `keep`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.core.mesh import over_heads, vary
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError


class Unit(Protocol):
    """What is kept or dropped as a whole."""

    @property
    def size(self) -> int:
        """Consecutive tokens."""
        ...

    @property
    def score(self) -> str:
        """Of a unit, from its tokens' scores: "sum", "mean" or "max"."""
        ...

    @property
    def aligned(self) -> bool:
        """Whether units are the pages of the row, counted from its very first token."""
        ...


@dataclasses.dataclass(frozen=True)
class Token:
    """Each token alone."""

    size = 1
    score = "sum"
    aligned = False


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Runs of `size` tokens, counted from the row's first token after the sinks."""

    size: int
    score: str = "sum"
    aligned = False

    def __post_init__(self):
        if self.size < 1:
            raise KvjaxError(f"a {type(self).__name__.lower()} has at least 1 token, got {self.size}")
        if self.score not in ("sum", "mean", "max"):
            raise KvjaxError(f"score must be 'sum', 'mean' or 'max', got {self.score!r}")


@dataclasses.dataclass(frozen=True)
class Page(Chunk):
    """Chunks that are the row's pages of `size` tokens: the sinks must fill whole pages."""

    aligned = True


class Split(NamedTuple):
    """How each row divides, in tokens (i32[B]) and in whole evictable units (i32[B])."""

    front: Array  # sinks
    back: Array  # recents and what stays of the remainder
    units: Array  # units there are
    quota: Array  # units that stay
    length: Array  # tokens of the row
    kept: Array  # tokens that stay


def check(pos: Array, keep: Array, slots: int, sinks: int, recent: int, unit: Unit) -> None:
    """Raises KvjaxError for sizes that cannot be; of traced `pos` and `keep` only the shapes are known."""
    always = f"{sinks} sinks + {recent} recents"
    if min(sinks, recent) < 0 or slots < 1:
        raise KvjaxError(f"sinks and recents are 0 or more and slots 1 or more, got {always} and {slots} slots")
    if unit.aligned and sinks % unit.size:
        raise KvjaxError(
            f"{sinks} sinks do not fill whole pages of {unit.size} tokens; use {-(-sinks // unit.size) * unit.size}"
        )
    if slots < min(pos.shape[-1], sinks + recent):
        raise KvjaxError(f"a budget of {slots} tokens is below {always}; use at least {sinks + recent}")
    if isinstance(pos, Tracer) or isinstance(keep, Tracer):
        return
    lengths = (np.asarray(pos)[:, 0] >= 0).sum(-1)
    for row, (n, length) in enumerate(zip(np.asarray(keep).tolist(), lengths.tolist(), strict=True)):
        if n > slots:
            raise KvjaxError(f"row {row} keeps {n} tokens but there are {slots} slots; use slots={n}")
        if n < min(length, sinks + recent):
            raise KvjaxError(f"row {row} has a budget of {n} tokens, below {always}; use at least {sinks + recent}")


def split(pos: Array, keep: Array, slots: int, sinks: int, recent: int, size: int) -> Split:
    """pos i32[B 1|K S], keep i32[B] -> Split. A budget below sinks + recent keeps the sinks, then the newest."""
    length = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
    keep = jnp.clip(jnp.asarray(keep, jnp.int32), 0, jnp.minimum(length, slots))
    front = jnp.minimum(sinks, keep)
    back = jnp.minimum(recent, keep - front)
    left, between = keep - front - back, length - front - back
    back = back + jnp.minimum(between % size, left)
    quota = (keep - front - back) // size
    return Split(front, back, between // size, quota, length, front + back + quota * size)


def by_unit(x: Array, sinks: int, size: int, axis: int = -1) -> Array:
    """Cuts the slots after the sinks into units: the axis S becomes U, c; short of one unit it is padded with 0."""
    axis %= x.ndim
    U = max((x.shape[axis] - sinks) // size, 1)
    grow = max(sinks + U * size - x.shape[axis], 0)
    x = jnp.pad(x, [(0, grow if a == axis else 0) for a in range(x.ndim)])
    x = jax.lax.slice_in_dim(x, sinks, sinks + U * size, axis=axis)
    return x.reshape(*x.shape[:axis], U, size, *x.shape[axis + 1 :])


def evictable(part: Split, U: int) -> Array:
    """bool[B U]: which of U units a row has."""
    return jnp.arange(U)[None] < part.units[:, None]


def unit_scores(scores: Array, sinks: int, unit: Unit) -> Array:
    """f32[B K S] -> f32[B K U]; what is no whole evictable unit may be anything."""
    x = by_unit(scores, sinks, unit.size)
    return {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max}[unit.score](x, -1)


def top(scores: Array, allowed: Array, count: Array) -> Array:
    """bool[B ... U]: the `count` i32[B ...] highest of scores f32[B ... U] that are allowed; ties to the lower index.

    Bit by bit, first those that differ in their scores, then by index among equals: no sort, which is slow on a CPU.
    Scores are looked at in one loop only: what XLA computes twice, it may round in two ways.
    """
    key, equal = jnp.broadcast_arrays(_ordered(scores), allowed)
    count = count.reshape(*count.shape, *(1,) * (key.ndim - count.ndim))

    def number(mask):
        return mask.sum(-1, keepdims=True, dtype=jnp.int32)

    def score_bit(i, found):
        chosen, equal, left = found  # of those that are equal in all higher bits, `left` are still to be chosen
        one = (key >> jnp.uint32(31 - i)) & 1 == 1
        ones = number(equal & one)
        enough = ones >= left
        return chosen | (equal & one & ~enough), equal & (one == enough), jnp.where(enough, left, left - ones)

    left = jnp.broadcast_to(count, (*key.shape[:-1], 1))
    chosen, equal, left = jax.lax.fori_loop(0, 32, score_bit, vary((jnp.zeros(key.shape, bool), equal, left)))
    index = jnp.arange(key.shape[-1], dtype=jnp.int32).reshape(*(1,) * (key.ndim - 1), -1)
    bits = key.shape[-1].bit_length()

    def index_bit(i, last):
        later = last | (jnp.int32(2 ** (bits - 1)) >> i)
        return jnp.where(number(equal & (index < later)) < left, later, last)

    last = jax.lax.fori_loop(0, bits, index_bit, vary(jnp.zeros_like(left)))
    return chosen | (equal & (left > 0) & (index <= last))


def _ordered(x: Array) -> Array:
    """f32 -> uint32 in the same order, both zeros alike."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x).astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(2**31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def indices(chosen: Array, part: Split, S: int, slots: int, sinks: int, size: int) -> Array:
    """Chosen units bool[B K U] and what always stays -> slots i32[B K slots], ascending, -1 where unused."""
    tokens = jnp.pad(jnp.repeat(chosen, size, -1), [(0, 0), (0, 0), (sinks, S)])[..., :S]
    at = jnp.arange(S, dtype=jnp.int32)[None]
    n = part.length[:, None]
    always = (at < part.front[:, None]) | ((at >= n - part.back[:, None]) & (at < n))
    found = jnp.sort(jnp.where(tokens | always[:, None], at[None], S), -1)[..., :slots]
    found = jnp.pad(found, [(0, 0), (0, 0), (0, slots - found.shape[-1])], constant_values=S)
    return jnp.where(found < S, found, -1)


def per_head(scores: Array, per: str) -> Array:
    """f32[B K S] for "head"; for "layer" their mean over the heads, f32[B 1 S], so that all keep the same tokens."""
    if per not in ("head", "layer"):
        raise KvjaxError(f"per must be 'head' or 'layer', got {per!r}")
    return scores if per == "head" else over_heads.mean(scores)


def select(
    scores: Array, pos: Array, keep: Array, slots: int, sinks: int, recent: int, unit: Unit, per: str = "head"
) -> Array:
    """The slots that stay, i32[B K slots] (K = 1 per layer), chronological, -1 in unused places.

    scores f32[B K S], pos i32[B 1|K S], rows left-aligned; keep i32[B]: the row's budget in tokens, at most `slots`.
    How many stay, and what becomes of an incomplete unit, says the head of this file; ties go to the earlier unit.
    Raises KvjaxError where sizes that are known when tracing cannot be.
    """
    check(pos, keep, slots, sinks, recent, unit)
    scores = per_head(scores, per)
    part = split(pos, keep, slots, sinks, recent, unit.size)
    s = unit_scores(scores, sinks, unit)
    chosen = top(s, evictable(part, s.shape[-1])[:, None], part.quota)
    return indices(chosen, part, scores.shape[-1], slots, sinks, unit.size)


def slots_where(mask: Array, count: int) -> Array:
    """bool[B K S] -> the slots where it holds, i32[B K count], ascending, -1 in unused places."""
    S = mask.shape[2]
    slot = jnp.arange(S, dtype=jnp.int32)[None, None]
    found = jnp.sort(jnp.where(mask, slot, S), 2)[:, :, :count]
    return jnp.where(found < S, found, -1)


def gather(block: KVBlock, idx: Array) -> KVBlock:
    """The tokens at slots idx i32[B 1|K n] as a block of n slots, empty where idx < 0; pos keeps K = 1 if idx does."""
    B, K, _, H = block.k.shape
    at = jnp.maximum(idx, 0)
    rows = jnp.broadcast_to(at, (B, K, at.shape[2]))[..., None]
    heads = max(block.pos.shape[1], idx.shape[1])
    where = jnp.broadcast_to(at, (B, heads, at.shape[2]))
    pos = _take(jnp.broadcast_to(block.pos, (B, heads, block.pos.shape[2])), where, 2)
    k, v = (_take(x, rows, 2) for x in (block.k, block.v))
    bias = None if block.bias is None else _take(block.bias, rows[..., 0], 2)
    return KVBlock(k, v, jnp.where(idx >= 0, pos, -1), bias)


def _take(x: Array, idx: Array, axis: int) -> Array:
    return jnp.take_along_axis(x, idx, axis, mode="promise_in_bounds")
