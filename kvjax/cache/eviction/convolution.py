"""Slots that mix tokens by weights from a convolution along the sequence, as LoCoCo's do."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.eviction.merging import evicted_mask, scores_of_kept
from kvjax.cache.eviction.selection import SelectedSlots
from kvjax.core import memory
from kvjax.core.attention import MASKED_LOGIT, weights
from kvjax.core.top_k import mask_to_slots, top_k_mask
from kvjax.core.types import Array, KVBlock


class Convolution(NamedTuple):
    """How M slots mix tokens, the same in all heads."""

    weight: Array  # f32[M 2*H w], over keys and values of w neighbours, w odd
    bias: Array  # f32[M]
    normalizer: Array  # f32[1], what the mix counts for beside a slot's own token


def convolved(
    block: KVBlock, kept: KVBlock, choice: SelectedSlots, by: Convolution, heavy: int, recent: int
) -> KVBlock:
    """What a choice keeps of a block [B K T H], with all but `heavy` slots of each head mixed.

    Heavy are the last `recent` tokens of a row, and of the others those of the highest scores. All tokens that are not,
    kept and lost ones, stand side by side under the convolution, in their order; its ReLU is the logit of a softmax
    over them. The first M other slots become (1 - normalizer) of themselves and normalizer of their mix, keys after
    rotation. A head that loses nothing stays as it is, bit for bit.
    """
    block, kept = block.clean(), kept.clean()
    held = jnp.broadcast_to(choice.slots >= 0, kept.k.shape[:3])
    newest = held & (kept.pos > block.pos.max(2, keepdims=True) - recent)
    others = jnp.full(held.shape[:2], heavy - recent, jnp.int32)
    heavies = newest | top_k_mask(scores_of_kept(kept, choice), held & ~newest, others)
    slot = mask_to_slots(
        evicted_mask(block, choice._replace(slots=jnp.where(heavies, choice.slots, -1))), block.k.shape[2]
    )
    anchors = held & ~heavies & evicted_mask(block, choice).any(2, keepdims=True)
    rank, M, own = jnp.cumsum(anchors, 2, dtype=jnp.int32) - 1, by.bias.shape[0], _rows(kept)
    mixed = memory.take(_mixed(_rows(block), slot, by), jnp.clip(rank, 0, M - 1))
    part = by.normalizer[None, None, None]
    new = (1 - part) * own + part * mixed
    new = jnp.where((anchors & (rank < M))[..., None], new, own).astype(kept.k.dtype)
    k, v = jnp.split(new, 2, -1)
    return dataclasses.replace(kept, k=k, v=v)


def _rows(block: KVBlock) -> Array:
    """Keys and values side by side, f32[B K T 2*H]."""
    return jnp.concatenate([block.k, block.v], -1).astype(jnp.float32)


def _mixed(rows: Array, slot: Array, by: Convolution) -> Array:
    """Of rows [B K T 2*H] those at slot i32[B K T], -1 behind them, as each of M slots mixes them: f32[B K M 2*H]."""
    B, K, T, channels = rows.shape
    real, edge = slot >= 0, (by.weight.shape[2] - 1) // 2
    x = jnp.where(real[..., None], memory.take(rows, jnp.maximum(slot, 0)), 0.0)
    heads = x.reshape(B * K, T, channels)
    axes = ("NTC", "OIT", "NCT")
    logits = lax.conv_general_dilated(
        heads, by.weight, (1,), [(edge, edge)], dimension_numbers=axes, precision=lax.Precision.HIGHEST
    )
    logits = jax.nn.relu(logits + by.bias[None, :, None]).reshape(B, K, -1, T)
    p, _, l = weights(jnp.where(real[:, :, None], logits, MASKED_LOGIT))
    mixed = jnp.einsum("bkmt,bktw->bkmw", p, x, precision=lax.Precision.HIGHEST)
    return mixed / jnp.maximum(l, 1e-30)[..., None]
