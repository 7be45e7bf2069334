"""Splits a text into a prompt and the queries that follow: calibration asks its earlier half by its later half."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from kvjax.core.attention import MASKED_LOGIT, Rule, scores, split_blocks
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import vary
from kvjax.core.types import Array, KVBlock


def split_halves(block: KVBlock, observation: Observation) -> tuple[Array, Array]:
    """Marks the tokens of each text's earlier half, bool[B 1|K S], and the queries of its later half, bool[B Q].

    In a text of an odd number of tokens the earlier half has one more.
    """
    length = (observation.pos >= 0).sum(-1, keepdims=True, dtype=jnp.int32)
    first = length - length // 2
    return (block.pos >= 0) & (block.pos < first[..., None]), observation.pos >= first


def max_logits(block: KVBlock, observation: Observation, asking: Array, rule: Rule, queries_at_once: int = 64) -> Array:
    """Computes the largest logit, before the softmax, that each slot gets from some queries.

    Args:
      block: keys and values [B K S H].
      observation: the queries.
      asking: bool[B Q], the queries that count.
      rule: the layer's window and soft cap.
      queries_at_once: size of the blocks of queries, which bounds memory.

    Returns:
      f32[B K S], over all query heads of a key/value head; MASKED_LOGIT where no such query sees the slot.
    """

    def add(largest: Array, block_of_queries: tuple[Array, Array]) -> tuple[Array, None]:
        q, pos = block_of_queries
        logits = rule.logits(scores(q, block.k), block.pos, pos)
        return jnp.maximum(largest, logits.max((2, 3))), None

    size = min(queries_at_once, observation.pos.shape[1])
    queries = split_blocks(observation.q, 3, size), split_blocks(jnp.where(asking, observation.pos, -1), 1, size, -1)
    return lax.scan(add, vary(jnp.full(block.k.shape[:3], MASKED_LOGIT)), queries)[0]
