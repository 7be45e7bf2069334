"""CapKV: keeps the tokens whose values add most to the volume of what a mean query can read."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.future_queries import mean_over_pre_rope, rotate_ahead, sum_queries, visible_to_next_query
from kvjax.methods.leverage_score import quadratic_forms


@dataclasses.dataclass(frozen=True)
class Capacity(kv.Scorer):
    """Scores tokens by the leverage of their values, each weighted by its key's cosine with a mean query (2604.25975).

    With A = I + sum of w_i v_i v_i^T, leaving token s out multiplies the determinant of A by 1 - w_s v_s A^-1 v_s. The
    mean query is that of the prompt without its rotation, after the sinks, rotated by the mean of the rotations of the
    next `future` positions. The fields are arguments of `cap`. Sinks take no part, and score 0.
    """

    num_queries: ClassVar[int | None] = None
    tau: kv.NonNegativeFloat = 5.0
    sinks: kv.NonNegativeInt = 4
    future: kv.PositiveInt = 512
    epsilon: kv.NonNegativeFloat = 1e-6

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        block, observation = block.clean(), self.require_observation(observation)
        mean = mean_over_pre_rope(observation, observation.pos >= self.sinks, spec.rope, sum_queries)[:, :, :, None]
        anchor = rotate_ahead(mean, spec.rope, block, jnp.arange(self.future, dtype=jnp.int32))[:, :, :, 0]
        cosine = jnp.einsum("bkgh,bksh->bkgs", _normalize(anchor), _normalize(block.k.astype(jnp.float32)))
        is_scored = visible_to_next_query(block, spec.rule) & (block.pos >= self.sinks)[:, :, None]
        logits = jnp.where(is_scored, self.tau * jnp.clip(cosine, -1.0, 1.0), kv.MASKED_LOGIT)
        weights = jnp.where(is_scored, jnp.exp(logits - logits.max(-1, keepdims=True)), 0.0)
        values = block.v.astype(jnp.float32)

        # A matrix for each query head; all of them at once would hold the values as often.
        def score_head(weights: kv.Array) -> kv.Array:
            scaled = values * jnp.where(weights > 0, weights + self.epsilon, 0.0)[..., None]
            return weights * quadratic_forms(values, jnp.einsum("bksh,bksi->bkhi", scaled, values), 1.0)

        heads = jnp.moveaxis(lax.map(score_head, jnp.moveaxis(weights, 2, 0)), 0, 2)
        return kv.head_scores(heads, heads.mean(2), block)


def _normalize(x: kv.Array) -> kv.Array:
    # The constant is torch's in `F.normalize`, which kvpress calls.
    return x / jnp.maximum(jnp.sqrt(jnp.square(x).sum(-1, keepdims=True)), 1e-12)


@kv.register_method(example="cap:budget=512", family="eviction after the prompt")
def cap(
    budget: kv.TokenBudget = 1024,
    tau: float = 5.0,
    sinks: int = 4,
    future: int = 512,
    epsilon: float = 1e-6,
    unit: str = "token",
    per: kv.Scope = "head",
) -> kv.Method:
    """Keeps the prompt tokens whose values point where no others do, among those that a mean query would read.

    Formula:
      score_s = mean over a head's query heads of w_s v_s A^-1 v_s, A = I + sum_i (w_i + epsilon) v_i v_i^T, w_s =
      exp(tau cos(m, k_s)) over its largest, m the mean query rotated ahead

    Differs:
      As in kvpress (CapPress) keys and queries are normalized, and the mean query is rotated ahead; the paper does
      neither. Statistics are of a sequence's own queries as the model makes them, so that models which normalize
      queries work too. Tokens that have left a layer's sliding window score 0.

    Args:
      budget, unit, per: as in `make_selection`.
      tau: sharpness of the weights (kvpress: 5).
      sinks: as in `make_selection`; they are left out of all statistics (kvpress: 4).
      future: positions ahead over which the rotation of the mean query is averaged (kvpress: 512).
      epsilon: added to the weights in the matrix (kvpress: 1e-6).

    Reference:
      CapKV, 2026, arXiv 2604.25975; constants of its press in kvpress
    """
    return kv.Method(select=kv.make_selection(Capacity(tau, sinks, future, epsilon), budget, sinks, 0, unit, per))
