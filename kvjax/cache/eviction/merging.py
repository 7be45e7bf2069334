"""What becomes of the tokens that a selection loses: folded into those that stay, and what all such rules share."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.eviction.selection import SelectedSlots
from kvjax.cache.protocol import LayerSpec
from kvjax.core.types import Array, KVBlock

MIN_KEY_NORM = 1e-6  # the least norm of a key that is divided by


@runtime_checkable
class MergeRule(Protocol):
    """The `merge` slot of a method: keys and values of lost tokens go into kept ones."""

    def __call__(self, block: KVBlock, kept: KVBlock, choice: SelectedSlots, spec: LayerSpec) -> KVBlock:
        """The prompt's block, what stays of it, and the choice that was made -> what stays, with the lost folded in.

        Slots keep their positions. A slot that stands for several tokens may say so in `KVBlock.bias`.
        """
        ...


class EvictedTokens(NamedTuple):
    """Which tokens of a block are lost, and the kept token whose key points most nearly the same way."""

    mask: Array  # bool[B K T]
    slot: Array  # i32[B K T], the nearest kept slot, the lower of equals; n, which there is not, where nothing is lost
    cosine: Array  # f32[B K T], between the two keys; 0 where nothing is lost


def evicted_mask(block: KVBlock, choice: SelectedSlots) -> Array:
    """bool[B K T]: the tokens of a block [B K T H] that the choice leaves out."""
    B, K, T = block.k.shape[:3]
    slots = jnp.broadcast_to(choice.slots, (B, K, choice.slots.shape[2]))
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.where(slots < 0, T, slots))
    stays = jnp.zeros((B, K, T), bool).at[index].set(True, mode="drop")
    return (block.pos >= 0) & ~stays


def match_evicted(block: KVBlock, kept: KVBlock, choice: SelectedSlots, at_once: int = 256) -> EvictedTokens:
    """The lost tokens of a block [B K T H] and the kept ones [B K n H] that they are nearest to, by cosine in float32.

    Memory grows with `at_once` x n, never with T x n. What empty slots hold does not matter.
    """
    towards, held = unit_vectors(kept.k), kept.pos >= 0

    def nearest_to(key: Array) -> tuple[Array, Array]:
        cosine = jnp.einsum("bkh,bknh->bkn", unit_vectors(key), towards)
        cosine = jnp.where(held, cosine, -jnp.inf)
        slot = cosine.argmax(-1).astype(jnp.int32)
        return slot, jnp.take_along_axis(cosine, slot[..., None], -1)[..., 0]

    found = lax.map(nearest_to, jnp.moveaxis(block.k, 2, 0), batch_size=at_once)
    slot, cosine = (jnp.moveaxis(x, 0, 2) for x in found)
    mask = evicted_mask(block, choice)
    return EvictedTokens(mask, jnp.where(mask, slot, kept.k.shape[2]), jnp.where(mask, cosine, 0.0))


def scatter_add(x: Array, slot: Array, slots: int) -> Array:
    """x f32[B K T ...] summed at slot i32[B K T] -> f32[B K slots ...]; what has no such slot goes nowhere."""
    B, K = slot.shape[:2]
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], slot)
    return jnp.zeros((B, K, slots, *x.shape[3:]), x.dtype).at[index].add(x, mode="drop")


def fold_into_kept(
    kept: Array, own: Array | float | np.float32, lost: Array, by: Array, slot: Array, whole: Array
) -> Array:
    """Rows kept [B K n H] times `own`, plus lost rows [B K T H] times by f32[B K T] at their slots, over the whole.

    whole: f32[B K n]. Computed in float32; a row where nothing arrives stays as it is, bit for bit.
    """
    n = kept.shape[2]
    total = scatter_add(by[..., None] * lost.astype(jnp.float32), slot, n)
    touched = scatter_add(jnp.ones(slot.shape), slot, n)[..., None] > 0
    new = (own * kept.astype(jnp.float32) + total) / whole[..., None]
    return jnp.where(touched, new.astype(kept.dtype), kept)


def scores_of_kept(kept: KVBlock, choice: SelectedSlots) -> Array:
    """f32[B K n]: what the scorer says of the kept tokens, 0 in empty slots."""
    held = jnp.broadcast_to(choice.slots >= 0, kept.k.shape[:3])
    slots = jnp.broadcast_to(jnp.maximum(choice.slots, 0), held.shape)
    return jnp.where(held, jnp.take_along_axis(choice.scores.per_kv_head, slots, 2), 0.0)


def gather_at_slots(x: Array, slot: Array) -> Array:
    """x f32[B K n] at slots i32[B K T]; 0 where there is no such slot."""
    n = x.shape[2]
    return jnp.where(slot < n, jnp.take_along_axis(x, jnp.minimum(slot, n - 1), 2), 0.0)


def unit_vectors(keys: Array) -> Array:
    """Keys [... H] divided by their norms, f32."""
    keys = keys.astype(jnp.float32)
    return keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), MIN_KEY_NORM)
