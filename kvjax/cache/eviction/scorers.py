"""Scorers: how important each prompt token is, from keys and values and the queries that a scorer observes."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.components import Scorer, Scores
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation, attention_mass
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError
from kvjax.utils.parameter_types import Odd, PositiveInt, Within, check_fields


class InvalidScores(KvjaxError):
    """Scores of real tokens that are no numbers."""


def head_scores(heads: Array, kv: Array, block: KVBlock) -> Scores:
    """Makes `Scores` from those of query heads f32[B K G S] and of key/value heads f32[B K S]."""
    real = block.pos >= 0
    B, K, S, _ = block.k.shape
    if kv.shape != (B, K, S) or heads.ndim != 4 or (*heads.shape[:2], heads.shape[3]) != (B, K, S):
        raise KvjaxError(
            f"scores are f32[B K S] = ({B}, {K}, {S}) of key/value heads, and f32[B K G S] of query heads; got "
            f"{kv.shape} and {heads.shape}"
        )
    # Padding must never win, whatever a scorer makes of it: NaN would, so that it is replaced and not multiplied.
    return Scores(jnp.where(real[:, :, None], heads, -jnp.inf), jnp.where(real, kv, -jnp.inf))


def token_scores(kv: Array, block: KVBlock) -> Scores:
    """Makes `Scores` from those of key/value heads alone, f32[B K S]."""
    return head_scores(kv[:, :, None], kv, block)


def rank_below_others(scores: Array, mask: Array) -> Array:
    """Moves masked scores of 0 and more below all others, and keeps the order among them."""
    return jnp.where(mask, -1.0 / (1.0 + scores), scores)


def window_query_mask(observation: Observation, num_queries: int) -> Array:
    """bool[B Q]: which queries are among the last `num_queries` of their sequence."""
    return (observation.pos >= 0) & (observation.pos > observation.pos.max(-1, keepdims=True) - num_queries)


def pre_window_mask(block: KVBlock, num_queries: int) -> Array:
    """bool[B 1|K S]: the slots before the last `num_queries` tokens of a sequence; sequences left-aligned."""
    real = block.pos >= 0
    return jnp.arange(real.shape[-1])[None, None] < real.sum(-1, keepdims=True, dtype=jnp.int32) - num_queries


def pool_scores(x: Array, inside: Array, kernel: int, pool: str) -> Array:
    """Pools scores over neighboring tokens, with stride 1, by torch's rules.

    Args:
      x: f32[... S].
      inside: bool[... S]; entries outside may be anything.
      kernel: neighbors, odd.
      pool: "avg", which divides by `kernel` at the edges too, or "max", which ignores what lies beyond them.
    """
    # Entries outside are the neutral number of each pool, and take no part; torch pads by the same numbers.
    init, op = (0.0, lax.add) if pool == "avg" else (-np.inf, lax.max)
    shape = (1,) * (x.ndim - 1) + (kernel,)
    pooled = lax.reduce_window(jnp.where(inside, x, init), np.float32(init), op, shape, (1,) * x.ndim, "SAME")
    return pooled / kernel if pool == "avg" else pooled


@dataclasses.dataclass(frozen=True)
class WindowAttention(Scorer):
    """Scores a token by the attention of the prompt's last queries, pooled over its neighbors.

    Args:
      num_queries: last queries of the prompt, the window. A prompt of no more tokens is all window.
      kernel: neighbors over which attention is pooled, odd; only tokens before the window take part.
      pool: "avg" or "max", see `pool_scores`.
      reduce: "mean" or "max" over the query heads of a key/value head.
      reduce_first: whether to reduce before pooling.

    Reference:
      SnapKV, Li et al. 2024, arXiv 2404.14469, section 4. It sums over the queries; the mean ranks alike.
    """

    num_queries: PositiveInt = 32
    kernel: Annotated[int, Odd()] = 5
    pool: Literal["avg", "max"] = "avg"
    reduce: Literal["mean", "max"] = "mean"
    reduce_first: bool = False

    __post_init__ = check_fields

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        attention = self.window_attention(block, self.require_observation(observation), spec)
        before = pre_window_mask(block, self.num_queries)
        reduce = jnp.mean if self.reduce == "mean" else jnp.max

        def pool(x: Array, before: Array) -> Array:
            # A weight is at most 1, so 1 + weight puts the window's own tokens above every token before them.
            return jnp.where(before, pool_scores(x, before, self.kernel, self.pool), 1.0 + x)

        heads = pool(attention, before[:, :, None])
        kv = pool(reduce(attention, 2), before) if self.reduce_first else reduce(heads, 2)
        return head_scores(heads, kv, block)

    def window_attention(self, block: KVBlock, observation: Observation, spec: LayerSpec) -> Array:
        """f32[B K G S]: mean attention of the window's queries to each slot, before any pooling."""
        in_window = window_query_mask(observation, self.num_queries).astype(jnp.float32)
        # A short prompt has fewer queries than the window; the mean is over its own.
        query_weights = in_window / jnp.maximum(in_window.sum(-1, keepdims=True), 1.0)
        return attention_mass(block, observation, query_weights, spec.rule)[0]


@dataclasses.dataclass(frozen=True)
class AccumulatedAttention(Scorer):
    """Scores a token by its attention summed over all prompt queries, mean over a key/value head's query heads.

    Args:
      normalise: "none" leaves the sum, which favors old tokens (H2O); "visible" divides it by the number of queries
        that can see the token (kvpress' observed attention).
      decay: a query t places before the last one counts decay ** t, in the sum and in the number (A2SF).

    Reference:
      H2O, Zhang et al. 2023, arXiv 2306.14048; A2SF, arXiv 2407.20485
    """

    num_queries: ClassVar[int | None] = None
    normalise: Literal["none", "visible"] = "none"
    decay: Annotated[float, Within("(0, 1]")] = 1.0

    __post_init__ = check_fields

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        observation = self.require_observation(observation)
        # Ages, not positions, are weighed: decay ** position would underflow in a long prompt.
        age = jnp.maximum(observation.pos.max(-1, keepdims=True) - observation.pos, 0).astype(jnp.float32)
        query_weights = jnp.exp(age * np.float32(np.log(self.decay)))
        heads, total_weight = attention_mass(block, observation, query_weights, spec.rule)
        if self.normalise == "visible":
            # Later tokens are seen by fewer queries; a padding slot is seen by none.
            heads = heads / jnp.maximum(total_weight, 1e-30)[:, :, None]
        return head_scores(heads, heads.mean(2), block)
