"""Attention to quantized keys and values that decodes one tile of heads and slots at a time, and uses it at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core import attention
from kvjax.core.mesh import vary
from kvjax.core.types import Array

# A tile of this size stays in a processor's cache, so decoded numbers never pass through main memory.
MAX_TILE_NUMBERS, MAX_TILE_SLOTS = 2**21, 2048
# A GPU writes decoded numbers to memory in any case, and launches several kernels for each tile: 16 tiles for 32,768
# tokens of 8 heads took 0.3 ms a layer on an H200, and all numbers at once take some 0.08 ms to write and to read.
GPU_TILE_NUMBERS = 2**26

DecodeTile = Callable[[Array, int, Array | int, int], Array]
"""(first head of B * K, number of heads, first slot, number of slots) -> f32[heads slots H], finite in every slot."""


class TileSize(NamedTuple):
    """The heads and slots that are decoded at a time."""

    heads: int  # of B * K, which they divide
    slots: int


def tile_size(num_heads: int, num_slots: int, H: int, slot_multiple: int = 1) -> TileSize:
    """Returns the largest tile of at most `MAX_TILE_NUMBERS` numbers, or `slot_multiple` slots if these are more.

    On a GPU the most are `GPU_TILE_NUMBERS`. `num_heads` is B * K; `slot_multiple` slots can only be decoded together,
    such as those of a word.
    """
    on_gpu = jax.default_backend() == "gpu"
    most = GPU_TILE_NUMBERS if on_gpu else MAX_TILE_NUMBERS
    most_slots = most // H if on_gpu else min(MAX_TILE_SLOTS, most // H)
    slots = max(most_slots // slot_multiple, 1) * slot_multiple
    # `lax.map` runs tiles of one shape: heads divide evenly, and slots that are left over are a tile of their own.
    slots = min(slots, num_slots)
    fits = [n for n in range(1, num_heads + 1) if num_heads % n == 0 and n * slots * H <= most]
    return TileSize(max(fits, default=1), slots)


def scores(q: Array, num_slots: int, size: TileSize, decode: DecodeTile) -> Array:
    """Scaled dot products of q [B K G T H] and the keys in `num_slots` slots: f32[B K G T S]."""
    B, K, G, T, H = q.shape
    q_heads = q.astype(jnp.float32).reshape(B * K, G, T, H)

    def score_tile(head: Array, start: Array | int, count: int) -> Array:
        q = lax.dynamic_slice_in_dim(q_heads, head, size.heads, 0)[None]
        return attention.scores(q, decode(head, size.heads, start, count)[None])[0]

    def score_heads(head: Array) -> Array:
        tiles = jnp.arange(num_slots // size.slots, dtype=jnp.int32)
        s = lax.map(lambda i: score_tile(head, i * size.slots, size.slots), tiles)
        s = jnp.moveaxis(s, 0, 3).reshape(size.heads, G, T, -1)
        rest = num_slots % size.slots
        return jnp.concatenate([s, score_tile(head, num_slots - rest, rest)], -1) if rest else s

    # `map`, not `vmap`: heads run one after the other, so that a single tile is decoded at any time.
    first_heads = jnp.arange(0, B * K, size.heads, dtype=jnp.int32)
    return lax.map(score_heads, first_heads).reshape(B, K, G, T, num_slots)


def mix(p: Array, H: int, size: TileSize, decode: DecodeTile) -> Array:
    """Sums the values [.. H] by weights p f32[B K G T S]: f32[B K G T H]."""
    B, K, G, T, num_slots = p.shape
    p_heads = p.reshape(B * K, G, T, num_slots)

    def mix_tile(head: Array, start: Array | int, count: int) -> Array:
        p = lax.dynamic_slice(p_heads, (head, 0, 0, start), (size.heads, G, T, count))
        return attention.mix(p[None], decode(head, size.heads, start, count)[None])[0]

    def mix_heads(head: Array) -> Array:
        # A carry, and not a sum over mapped tiles, which would hold an output of each tile.
        zero, tiles = vary(jnp.zeros((size.heads, G, T, H))), jnp.arange(num_slots // size.slots, dtype=jnp.int32)
        out, _ = lax.scan(lambda acc, i: (acc + mix_tile(head, i * size.slots, size.slots), None), zero, tiles)
        rest = num_slots % size.slots
        return out + mix_tile(head, num_slots - rest, rest) if rest else out

    first_heads = jnp.arange(0, B * K, size.heads, dtype=jnp.int32)
    return lax.map(mix_heads, first_heads).reshape(B, K, G, T, H)
