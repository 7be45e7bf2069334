"""The component `merge`: folds evicted tokens into the kept ones, and the steps that merge rules have in common."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.components import SelectedSlots
from kvjax.core.types import Array, KVBlock

MIN_KEY_NORM = 1e-6
"""Lower bound of a norm by which something is divided, so that a vector of zeros gives no NaN."""


class EvictedTokens(NamedTuple):
    """The evicted tokens of a block, each with the kept token whose key has the most similar direction."""

    mask: Array  # bool[B K T]
    slot: Array  # i32[B K T], index of that kept token, the lower of equals; n, out of range, where not evicted
    cosine: Array  # f32[B K T], cosine similarity of the two keys; 0 where not evicted


def evicted_mask(block: KVBlock, choice: SelectedSlots) -> Array:
    """bool[B K T]: the tokens of a block [B K T H] that the choice leaves out."""
    B, K, T = block.k.shape[:3]
    slots = jnp.broadcast_to(choice.slots, (B, K, choice.slots.shape[2]))
    # Unused places go out of bounds, where they are dropped; -1 would mark the last token as kept.
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.where(slots < 0, T, slots))
    is_kept = jnp.zeros((B, K, T), bool).at[index].set(True, mode="drop")
    return (block.pos >= 0) & ~is_kept


def match_evicted(block: KVBlock, kept: KVBlock, choice: SelectedSlots, at_once: int = 256) -> EvictedTokens:
    """Matches every evicted token to its most similar kept one, by cosine in float32.

    Args:
      block: the prompt [B K T H].
      kept: its kept tokens [B K n H]; empty slots may hold anything.
      choice: the selection's result.
      at_once: tokens matched together. Memory grows with `at_once` * n, never with T * n.
    """
    kept_directions, is_kept = unit_vectors(kept.k), kept.pos >= 0

    def match_token(key: Array) -> tuple[Array, Array]:
        cosine = jnp.einsum("bkh,bknh->bkn", unit_vectors(key), kept_directions)
        cosine = jnp.where(is_kept, cosine, -jnp.inf)
        slot = cosine.argmax(-1).astype(jnp.int32)
        return slot, jnp.take_along_axis(cosine, slot[..., None], -1)[..., 0]

    # Kept tokens are matched too, and masked afterwards: how many are evicted is not known while tracing.
    matches = lax.map(match_token, jnp.moveaxis(block.k, 2, 0), batch_size=at_once)
    slot, cosine = (jnp.moveaxis(x, 0, 2) for x in matches)
    mask = evicted_mask(block, choice)
    return EvictedTokens(mask, jnp.where(mask, slot, kept.k.shape[2]), jnp.where(mask, cosine, 0.0))


def scatter_add(x: Array, slot: Array, num_slots: int) -> Array:
    """Sums x f32[B K T ...] at slot i32[B K T]: f32[B K num_slots ...]; tokens with no such slot are dropped."""
    B, K = slot.shape[:2]
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], slot)
    return jnp.zeros((B, K, num_slots, *x.shape[3:]), x.dtype).at[index].add(x, mode="drop")


def fold_into_kept(
    kept: Array, own: Array | float | np.float32, lost: Array, by: Array, slot: Array, whole: Array
) -> Array:
    """Computes (own * kept + sum of by * lost) / whole, in float32.

    Args:
      kept: kept keys or values [B K n H].
      own: their weight, broadcastable to `kept`.
      lost: keys or values of the prompt [B K T H].
      by: f32[B K T], their weights.
      slot: i32[B K T], the slot that each goes to; n for none.
      whole: f32[B K n], the sum of weights of each slot.

    Returns:
      [B K n H]. A slot where no token arrives stays as it is, bit for bit.
    """
    n = kept.shape[2]
    total = scatter_add(by[..., None] * lost.astype(jnp.float32), slot, n)
    # Told by counting: a slot whose sum is that of no token is not divided and rounded anew.
    is_changed = scatter_add(jnp.ones(slot.shape), slot, n)[..., None] > 0
    new = (own * kept.astype(jnp.float32) + total) / whole[..., None]
    return jnp.where(is_changed, new.astype(kept.dtype), kept)


def scores_of_kept(kept: KVBlock, choice: SelectedSlots) -> Array:
    """f32[B K n]: the scores of the kept tokens, 0 in empty slots."""
    is_used = jnp.broadcast_to(choice.slots >= 0, kept.k.shape[:3])
    slots = jnp.broadcast_to(jnp.maximum(choice.slots, 0), is_used.shape)
    return jnp.where(is_used, jnp.take_along_axis(choice.scores.per_kv_head, slots, 2), 0.0)


def gather_at_slots(x: Array, slot: Array) -> Array:
    """Takes x f32[B K n] at slots i32[B K T]; 0 where there is no such slot."""
    n = x.shape[2]
    return jnp.where(slot < n, jnp.take_along_axis(x, jnp.minimum(slot, n - 1), 2), 0.0)


def unit_vectors(keys: Array) -> Array:
    """Divides keys [... H] by their norms, f32."""
    keys = keys.astype(jnp.float32)
    return keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), MIN_KEY_NORM)
