"""Vectors by the nearest of a few: codebooks that a prompt's own keys give, for errors that queries would see."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from kvjax.cache.readers.base import split_blocks
from kvjax.core.types import Array


def fitted(x: Array, real: Array, moment: Array, count: int, rounds: int) -> Array:
    """f32[B K count H]: the centres of Lloyd's k-means of vectors x f32[B K S H], zeros where none is needed.

    Of each row and head those count that are real bool[B K S]; they stand at the front. moment f32[B K H H]: the mean
    of q q^T over queries, by which the distance of a vector and a centre is the mean of (q (x - c))^2. Centres begin at
    vectors with equally many between them; one that no vector is nearest to stays. Of no more vectors than centres each
    begins as one: in the order of the vectors.
    """
    n, centre = real.sum(2, dtype=jnp.int32)[..., None], jnp.arange(count, dtype=jnp.int32)[None, None]
    even = centre * (n // count) + centre * (n % count) // count  # floor(centre n / count) without a large product
    first = jnp.where(n > count, even, centre)
    used = (centre < n)[..., None]
    start = jnp.take_along_axis(x, jnp.minimum(first, x.shape[2] - 1)[..., None], 2)
    start = jnp.where(used, start, 0.0)
    rows, heads = (jnp.arange(size, dtype=jnp.int32) for size in x.shape[:2])

    def round_(_: int, centres: Array) -> Array:
        mine = jnp.where(real, nearest(x, centres, moment, used[..., 0]), count)  # what lies outside is dropped
        at = (rows[:, None, None], heads[None, :, None], mine)
        sums = jnp.zeros_like(centres).at[at].add(jnp.where(real[..., None], x, 0.0), mode="drop")
        number = jnp.zeros(centres.shape[:3]).at[at].add(1.0, mode="drop")[..., None]
        return jnp.where(number > 0, sums / jnp.maximum(number, 1.0), centres)

    return lax.fori_loop(0, rounds, round_, start)


def nearest(x: Array, centres: Array, moment: Array, used: Array | None = None, at_once: int = 1024) -> Array:
    """i32[B K n]: which of the centres f32[B K C H] each of x f32[B K n H] is nearest to; of equally near, the first.

    used bool[B K C]: only these count. Memory grows with `at_once` x C, never with n x C.
    """
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    weighed = product(centres, moment)
    length = (weighed * centres).sum(-1)
    length = length if used is None else jnp.where(used, length, jnp.inf)

    def of(some: Array) -> Array:
        # The length of x itself is the same for all centres.
        return jnp.argmin(length[:, :, None] - 2 * product(some, weighed.swapaxes(2, 3)), -1).astype(jnp.int32)

    if x.shape[2] <= at_once:
        return of(x)
    found = lax.map(of, split_blocks(x, 2, at_once))
    return jnp.moveaxis(found, 0, 2).reshape(*x.shape[:2], -1)[:, :, : x.shape[2]]
