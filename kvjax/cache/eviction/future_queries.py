"""Future queries: a prompt's queries without their rotation, averaged and rotated to the positions that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.attention import Rule, split_blocks, visible
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
    """Averages something over a prompt's queries without their rotation.

    Args:
      observation: the queries.
      counted: bool[B Q], which of them count.
      rope: the model's rotary embedding.
      total: computes the sum over some queries from f32[B K G q H], with zeros where a query does not count, and
        f32[B 1 1 q 1], 1 where it counts: any pytree of arrays f32[B K G ...].
      queries_at_once: size of the blocks that `total` is called with, which bounds memory.

    Returns:
      The pytree of `total`; 0 for a sequence without a query that counts.
    """

    def sum_block(q: Array, pos: Array, counts: Array) -> Any:
        counts = counts[:, None, None, :, None]
        return total(jnp.where(counts, rope.unrotate_queries(q, pos), 0.0), counts.astype(jnp.float32))

    def add(sums: Any, xs: tuple[Array, Array, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, sum_block(*xs)), None

    # A block at a time: without rotation queries are float32, and all of them at once would outgrow the prompt's keys.
    size = min(queries_at_once, observation.pos.shape[1])
    blocks = (
        split_blocks(observation.q, 3, size),
        split_blocks(observation.pos, 1, size, -1),
        split_blocks(counted, 1, size),
    )
    shapes = jax.eval_shape(sum_block, *(x[0] for x in blocks))
    sums, _ = lax.scan(add, vary(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)), blocks)
    num_counted = jnp.maximum(counted.sum(1, dtype=jnp.int32), 1).astype(jnp.float32)
    return jax.tree.map(lambda x: x / num_counted.reshape(-1, *(1,) * (x.ndim - 1)), sums)


def sum_queries(q: Array, counts: Array) -> Array:
    """f32[B K G H]: the `total` with which `mean_over_pre_rope` is the mean query of each head."""
    return q.sum(3)


def next_positions(block: KVBlock) -> Array:
    """i32[B 1]: the position after each sequence's newest token, which every head holds."""
    return block.pos.max(2)[:, :1] + 1


def rotate_ahead(x: Array, rope: Rope, block: KVBlock, steps: Array) -> Array:
    """Averages the rotations of vectors to several positions ahead of a block.

    Args:
      x: f32[B K G n H], without rotation.
      rope: the model's rotary embedding.
      block: the prompt.
      steps: i32[n], counted from the next token's position.

    Returns:
      f32[B K G n H], shorter than x: a mean of rotations is no rotation.
    """
    # A rotation is linear in its cosine and sine, so the mean of rotations is one with the mean cosine and sine.
    angles = rope.angles(next_positions(block) + steps[None])
    cos, sin = (a.mean(1)[:, None, None, None] for a in angles)
    return rotate(x, cos, sin)


def visible_to_next_query(block: KVBlock, rule: Rule) -> Array:
    """bool[B 1|K 1 S]: the slots that the next token's query sees; later ones see no others in a sliding window."""
    return visible(block.pos, next_positions(block), rule)[:, :, :, 0]
