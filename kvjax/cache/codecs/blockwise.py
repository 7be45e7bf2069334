"""Attention to rows that are held in codes: a piece of heads and slots at a time is decoded, and used at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kvjax.core import attention
from kvjax.core.mesh import vary
from kvjax.core.types import Array

PIECE, CHUNK = 2**21, 2048  # numbers, and slots at most, decoded at a time: none of it goes through main memory

Decode = Callable[[Array, int, Array | int, int], Array]
"""(first row of B * K, how many rows, first slot, how many slots) -> f32[rows slots H], finite in every slot."""


class Size(NamedTuple):
    """What is decoded at a time."""

    rows: int  # of B * K, which they divide
    slots: int


def size_of(rows: int, slots: int, H: int, whole: int = 1) -> Size:
    """Pieces of so many rows of B * K and slots: PIECE numbers at most, where that is possible, in `whole` slots."""
    chunk = min(max(min(CHUNK, PIECE // H) // whole, 1) * whole, slots)
    fits = [n for n in range(1, rows + 1) if rows % n == 0 and n * chunk * H <= PIECE]
    return Size(max(fits, default=1), chunk)


def scores(q: Array, slots: int, size: Size, decode: Decode) -> Array:
    """q [B K G T H] against the keys in so many slots -> f32[B K G T S], over the root of H."""
    B, K, G, T, H = q.shape
    q_rows = q.astype(jnp.float32).reshape(B * K, G, T, H)

    def piece(row: Array, start: Array | int, count: int) -> Array:
        q = lax.dynamic_slice_in_dim(q_rows, row, size.rows, 0)[None]
        return attention.scores(q, decode(row, size.rows, start, count)[None])[0]

    def of_rows(row: Array) -> Array:
        def step(_, i):
            return (None, piece(row, i * size.slots, size.slots))

        s = lax.scan(step, None, jnp.arange(slots // size.slots, dtype=jnp.int32))[1]
        s = jnp.moveaxis(s, 0, 3).reshape(size.rows, G, T, -1)
        left = slots % size.slots
        return jnp.concatenate([s, piece(row, slots - left, left)], -1) if left else s

    return lax.map(of_rows, _first_rows(B * K, size)).reshape(B, K, G, T, slots)


def mix(p: Array, H: int, size: Size, decode: Decode) -> Array:
    """Weights f32[B K G T S] over the values [.. H] in these slots -> f32[B K G T H]."""
    B, K, G, T, slots = p.shape
    p_rows = p.reshape(B * K, G, T, slots)

    def piece(row: Array, start: Array | int, count: int) -> Array:
        p = lax.dynamic_slice(p_rows, (row, 0, 0, start), (size.rows, G, T, count))
        return attention.mix(p[None], decode(row, size.rows, start, count)[None])[0]

    def of_rows(row: Array) -> Array:
        def step(acc, i):
            return (acc + piece(row, i * size.slots, size.slots), None)

        zero = vary(jnp.zeros((size.rows, G, T, H)))
        out = lax.scan(step, zero, jnp.arange(slots // size.slots, dtype=jnp.int32))[0]
        left = slots % size.slots
        return out + piece(row, slots - left, left) if left else out

    return lax.map(of_rows, _first_rows(B * K, size)).reshape(B, K, G, T, H)


def _first_rows(rows: int, size: Size) -> Array:
    """The first row of each piece."""
    return jnp.arange(0, rows, size.rows, dtype=jnp.int32)
