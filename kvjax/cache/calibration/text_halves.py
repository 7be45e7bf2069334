"""A text as a prompt and what asks it: what calibration takes the earlier and the later half of a text for."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from kvjax.cache.readers.base import cut
from kvjax.core.attention import MASKED_LOGIT, scores, visible
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import vary
from kvjax.core.types import Array, KVBlock


def halves(block: KVBlock, observation: Observation) -> tuple[Array, Array]:
    """The tokens of the earlier half of each text, bool[B 1|K S], and the queries of the later half, bool[B Q].

    Of a text of an odd number of tokens the earlier half has one more.
    """
    length = (observation.pos >= 0).sum(-1, keepdims=True, dtype=jnp.int32)
    first = length - length // 2
    return (block.pos >= 0) & (block.pos < first[..., None]), observation.pos >= first


def greatest_logits(
    block: KVBlock, observation: Observation, asking: Array, window: int | None, queries_at_once: int = 64
) -> Array:
    """f32[B K S]: the greatest logit that a slot gets from the asking queries bool[B Q] of its query heads.

    Scaled dot products, before any softmax; MASKED_LOGIT where no asking query sees the slot.
    """

    def add(greatest: Array, some: tuple[Array, Array]) -> tuple[Array, None]:
        q, pos = some
        logits = jnp.where(visible(block.pos, pos, window), scores(q, block.k), MASKED_LOGIT)
        return jnp.maximum(greatest, logits.max((2, 3))), None

    size = min(queries_at_once, observation.pos.shape[1])
    queries = cut(observation.q, 3, size), cut(jnp.where(asking, observation.pos, -1), 1, size, -1)
    return lax.scan(add, vary(jnp.full(block.k.shape[:3], MASKED_LOGIT)), queries)[0]
