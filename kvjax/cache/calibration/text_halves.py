"""Splits a text into a prompt and the queries that follow: calibration asks its earlier half by its later half.

What the later half gives a token of the earlier one can be predicted by a linear map of the token's own vectors, which
`sum_moments` and `fit_linear_map` make: ridge regression from sums over texts.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.core.attention import MASKED_LOGIT, Rule, scores, split_blocks
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import vary
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError


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


def sum_moments(x: Array, y: Array, counts: Array) -> dict[str, Array]:
    """Sums over each text what `fit_linear_map` needs.

    Args:
      x: inputs f32[B T D] of each token.
      y: targets f32[B K T].
      counts: bool[B 1 T], the tokens that have a target.
    """
    x, y = jnp.where(counts[:, 0, :, None], x, 0.0), jnp.where(counts, y, 0.0)
    return {
        "tokens": counts.sum(2, keepdims=True, dtype=jnp.float32),
        "x": x.sum(1)[:, None],
        "y": y.sum(2, keepdims=True),
        "xx": jnp.einsum("btc,btd->bcd", x, x, precision=lax.Precision.HIGHEST)[:, None],
        "xy": jnp.einsum("btc,bkt->bkc", x, y, precision=lax.Precision.HIGHEST),
    }


def fit_linear_map(moments: dict[str, np.ndarray], ridge: int) -> tuple[np.ndarray, np.ndarray]:
    """Fits the linear map f64[K D] and its offsets f64[K] to the sums of `sum_moments` over all texts.

    Args:
      moments: the sums.
      ridge: 1 / ridge of the inputs' mean variance is added to their variances.

    Raises:
      KvjaxError: no token has a target.
    """
    tokens = moments["tokens"].item()
    if not tokens:
        raise KvjaxError("no token of these texts is asked by a later one; give texts of at least 2 tokens")
    x, y = moments["x"] / tokens, moments["y"] / tokens
    covariance = moments["xx"][0] / tokens - x.T @ x
    covariance += np.eye(len(covariance)) * (np.trace(covariance) / len(covariance) / ridge + 1e-12)
    weight = np.linalg.solve(covariance, (moments["xy"] / tokens - y * x).T).T
    return weight, (y - weight @ x.T)[:, 0]
