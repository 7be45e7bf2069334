"""Exact top-k and top-p, as indices or as masks, and the slots that a mask selects."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int32

from kvjax.core.mesh import vary
from kvjax.core.types import Array

# On a GPU, XLA sorts whole rows where ties must come in order: some 15 kernels a layer. Where they need not, it has a
# selection (RAFT's, for k up to about 128 of long rows). JAX can ask for it from 0.11.2 on.
_ANY_ORDER_OF_TIES: dict[str, Any] = (
    {"is_stable": False} if "is_stable" in inspect.signature(jax.lax.top_k).parameters else {}
)


def top_k(x: Float[Array, "*rest U"], k: int) -> tuple[Float[Array, "*rest {k}"], Int32[Array, "*rest {k}"]]:
    """Selects the k highest entries along the last axis, the highest first.

    `jax.lax.top_k` gives the lower index of two equal entries; on a GPU this function may give either, and needs no
    sort. Use `jax.lax.top_k` where the order of equal entries shows, and `top_k_mask` where k is traced.

    Args:
      x: scores, no NaN.
      k: at most U.

    Returns:
      The entries and their indices.
    """
    best, index = jax.lax.top_k(x, k, **_ANY_ORDER_OF_TIES)
    return best, index


def top_k_mask(
    scores: Float[Array, "*rest U"], allowed: Bool[Array, "..."], k: Int32[Array, "..."] | int
) -> Bool[Array, "*rest U"]:
    """Marks the k highest allowed scores along the last axis; ties go to the lower index.

    `k` is traced and may differ per sequence or head, which `jax.lax.top_k` cannot do.

    Args:
      scores: one for each entry.
      allowed: broadcastable to `scores`; entries that are not allowed may score anything, NaN included.
      k: one number, or [B ...], broadcast over missing trailing axes. Where fewer are allowed, all of them are marked.

    Returns:
      The mask.
    """
    # Integers that compare as the scores do, with -0.0 equal to 0.0. Floats of one sign are ordered as their bits are,
    # negative ones in reverse: these are inverted, and lie below.
    scores = jnp.where(scores == 0, 0.0, scores).astype(jnp.float32)
    bits, sign = jax.lax.bitcast_convert_type(scores, jnp.uint32), jnp.uint32(2**31)
    keys, tied = jnp.broadcast_arrays(jnp.where(bits >= sign, ~bits, bits | sign), allowed)
    k = jnp.asarray(k, jnp.int32)
    k = k.reshape(*k.shape, *(1,) * (keys.ndim - k.ndim))

    def count(mask):
        return mask.sum(-1, keepdims=True, dtype=jnp.int32)

    # Radix selection, most significant bit first: no sort, which is slow on a CPU. `tied` are the entries whose higher
    # bits all equal those of the k-th best score; `remaining` of them are still to be selected. Scores are read in this
    # one loop only: XLA may fuse a second reader differently and round the same expression in two ways.
    def refine_by_score_bit(i, carry):
        selected, tied, remaining = carry
        bit_is_set = (keys >> jnp.uint32(31 - i)) & 1 == 1
        num_set = count(tied & bit_is_set)
        enough = num_set >= remaining
        selected = selected | (tied & bit_is_set & ~enough)
        return selected, tied & (bit_is_set == enough), jnp.where(enough, remaining, remaining - num_set)

    remaining = jnp.broadcast_to(k, (*keys.shape[:-1], 1))
    selected, tied, remaining = jax.lax.fori_loop(
        0, 32, refine_by_score_bit, vary((jnp.zeros(keys.shape, bool), tied, remaining))
    )

    # What is tied now has equal scores. A binary search finds the index of the last one that is selected.
    index = jnp.arange(keys.shape[-1], dtype=jnp.int32).reshape(*(1,) * (keys.ndim - 1), -1)
    num_index_bits = keys.shape[-1].bit_length()

    def refine_by_index_bit(i, last):
        later = last | (jnp.int32(2 ** (num_index_bits - 1)) >> i)
        return jnp.where(count(tied & (index < later)) < remaining, later, last)

    last = jax.lax.fori_loop(0, num_index_bits, refine_by_index_bit, vary(jnp.zeros_like(remaining)))
    return selected | (tied & (remaining > 0) & (index <= last))


def rank(x: Float[Array, "*rest U"]) -> Int32[Array, "*rest U"]:
    """Ranks the entries along the last axis, the highest is 0; ties go to the lower index."""
    order = jnp.argsort(-x, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


BOUNDARY_ROUNDING = 1e-6
"""Relative error of a sum that counts as reaching its bound. Sums in float32 of .3, .3 and .2 miss .8 by a few units in
the last place, and an entry more or less would be a matter of luck."""


def covering_mask(
    falling: Float32[Array, "*rest U"], fraction: Float32[Array, "..."] | float
) -> Bool[Array, "*rest U"]:
    """Marks the fewest first entries along the last axis that reach a fraction of the total, up to rounding (top-p).

    Args:
      falling: none negative, the largest first.
      fraction: in (0, 1], one number; 1 marks all entries, also those that a rounded sum no longer shows.

    Returns:
      The mask; the first entry is always marked where the total is positive.
    """
    # The entries before each one, summed up to there: subtracting each from the sum that includes it would leave its
    # rounding error behind.
    before = jnp.pad(jnp.cumsum(falling, -1)[..., :-1], [(0, 0)] * (falling.ndim - 1) + [(1, 0)])
    bound = fraction * (1 - BOUNDARY_ROUNDING) * falling.sum(-1, keepdims=True)
    return (before < bound) | (jnp.asarray(fraction) >= 1)


def mask_to_slots(mask: Bool[Array, "B K S"], num_slots: int) -> Int32[Array, "B K num_slots"]:
    """Lists the first `num_slots` true entries in ascending order, -1 where there are fewer."""
    # Sorted, not scattered to their ranks: a scatter of S single numbers is slow on every backend.
    S = mask.shape[2]
    slot = jnp.arange(S, dtype=jnp.int32)[None, None]
    slots = jnp.sort(jnp.where(mask, slot, S), 2)[:, :, :num_slots]
    return jnp.where(slots < S, slots, -1)
