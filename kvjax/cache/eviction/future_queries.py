"""The queries to come: a prompt's queries without their rotation, in the mean, turned to the positions ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.readers.base import split_blocks
from kvjax.core.attention import visible
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import vary
from kvjax.core.rope import Rope, rotate
from kvjax.core.types import Array, KVBlock


def mean_over_pre_rope(
    observation: Observation,
    counted: Array,
    rope: Rope,
    total: Callable[[Array, Array], Any],
    queries_at_once: int = 64,
) -> Any:
    """The mean of something over those queries of each row that are counted, bool[B Q], without their rotation.

    total: its sum over some bare queries, f32[B K G q H] with zeros in those that do not count, and what each counts
    for, f32[B 1 1 q 1] -> arrays f32[B K G ...]. Where no query counts the mean is 0.
    """

    def of_block(q: Array, pos: Array, counts: Array) -> Any:
        counts = counts[:, None, None, :, None]
        return total(jnp.where(counts, rope.unrotate_queries(q, pos), 0.0), counts.astype(jnp.float32))

    def add(sums: Any, xs: tuple[Array, Array, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, of_block(*xs)), None

    size = min(queries_at_once, observation.pos.shape[1])
    blocks = (
        split_blocks(observation.q, 3, size),
        split_blocks(observation.pos, 1, size, -1),
        split_blocks(counted, 1, size),
    )
    one = jax.eval_shape(of_block, *(x[0] for x in blocks))
    sums, _ = lax.scan(add, vary(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), one)), blocks)
    number = jnp.maximum(counted.sum(1, dtype=jnp.int32), 1).astype(jnp.float32)
    return jax.tree.map(lambda x: x / number.reshape(-1, *(1,) * (x.ndim - 1)), sums)


def sum_queries(q: Array, counts: Array) -> Array:
    """f32[B K G H]: what makes `mean_over_pre_rope` the mean query of each head."""
    return q.sum(3)


def next_position(block: KVBlock) -> Array:
    """i32[B 1]: the position after each row's newest token, which every head holds."""
    return block.pos.max(2)[:, :1] + 1


def rotate_ahead(x: Array, rope: Rope, block: KVBlock, steps: Array) -> Array:
    """Bare vectors x f32[B K G n H] in the mean of their rotations to positions ahead of a block.

    steps: i32[n], counted from the next token's position. The mean of rotations is shorter than any of them.
    """
    angles = rope.angles(next_position(block) + steps[None])
    cos, sin = (a.mean(1)[:, None, None, None] for a in angles)
    return rotate(x, cos, sin)


def visible_to_next_query(block: KVBlock, window: int | None) -> Array:
    """bool[B 1|K 1 S]: the slots that the next token's query can see; a sliding window only ever loses more."""
    return visible(block.pos, next_position(block), window)[:, :, :, 0]
