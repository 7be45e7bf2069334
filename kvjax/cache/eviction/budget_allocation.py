"""Allocation of a budget: among the layers once all of them have seen the prompt, and among a layer's heads."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from kvjax.core.types import Array

SHARED_ROUNDING = 16
"""A layer's slots are a multiple of this where layers divide a budget; see `round_up_shared`."""


def round_up_shared(num_slots: int, mean_slots: int, most_slots: int) -> int:
    """Rounds a layer's slots up to one of few sizes, where layers divide a budget.

    The sizes are 1, 2, 3, 4, 6, 8, 12, 16, .. times `SHARED_ROUNDING`, two for each doubling, and at least a quarter of
    the mean. Every size is a shape, and so a program of its own for the prompt, for a question and for a step: with
    multiples of 16 nearly all layers, and most texts, compiled theirs. A size is at most half as large again as what it
    holds, and a sixth in the mean.

    Args:
      num_slots: of the layer.
      mean_slots: of all layers.
      most_slots: tokens of the longest prompt; beyond them a larger size would be of no use.
    """
    units = max(1, -(-max(num_slots, mean_slots // 4) // SHARED_ROUNDING))
    power = 1 << (units.bit_length() - 1)  # the largest power of two up to `units`
    size = SHARED_ROUNDING * next(size for size in (power, power * 3 // 2, 2 * power) if size >= units)
    whole_prompt = -(-most_slots // SHARED_ROUNDING) * SHARED_ROUNDING
    return min(size, max(whole_prompt, num_slots))


def most_shared_slots(mean_slots: int, most_slots: int) -> int:
    """The most slots that `round_up_shared` gives layers in the mean, which need `mean_slots` in the mean."""
    whole_prompt = -(-most_slots // SHARED_ROUNDING) * SHARED_ROUNDING
    return min((mean_slots + mean_slots // 4 + SHARED_ROUNDING) * 3 // 2, max(whole_prompt, mean_slots))


def match_total(parts: Array, total: Array, least: Array, most: Array) -> Array:
    """Moves the parts of each sequence by one common amount until they sum to its total.

    Args:
      parts: i32[n B].
      total: i32[B]; a total that the bounds cannot make is replaced by the nearest that they can.
      least: i32[B], lower bound of each part.
      most: i32[B], upper bound. Where a bound cuts a part off, the difference goes to the others.

    Returns:
      i32[n B]. Where an amount cannot be divided equally, the first parts take one more.
    """
    n = parts.shape[0]
    total = jnp.clip(total, n * least, n * most)

    # Each round divides what is missing among the parts that can still move. A part that hits its bound drops out, so
    # there are at most n rounds.
    def move(parts: Array) -> Array:
        amount = total - parts.sum(0, dtype=jnp.int32)
        free = jnp.where(amount > 0, parts < most[None], parts > least[None])
        num_free = jnp.maximum(free.sum(0, dtype=jnp.int32), 1)
        each, rest = jnp.abs(amount) // num_free, jnp.abs(amount) % num_free
        one_more = jnp.cumsum(free, 0, dtype=jnp.int32) <= rest[None]
        by = jnp.where(free, each[None] + one_more.astype(jnp.int32), 0)
        return jnp.clip(parts + jnp.sign(amount)[None] * by, least[None], most[None])

    start = jnp.clip(parts, least[None], most[None])
    return lax.while_loop(lambda parts: (parts.sum(0, dtype=jnp.int32) != total).any(), move, start)
