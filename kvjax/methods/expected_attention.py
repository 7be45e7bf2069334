"""Expected Attention: keeps the tokens that future queries attend to, if these are like the prompt's."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.future_queries import mean_over_pre_rope, rotate_ahead, sum_queries, visible_to_next_query


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(kv.Scorer):
    """Scores tokens by the expected attention of a normally distributed future query, times |v|.

    Devoto et al. 2025, arXiv 2510.00636; kvpress. Mean and covariance are those of the pre-RoPE queries after the
    sinks, rotated by the mean of the rotations of the next `future` positions. The expectation of exp(q k / sqrt(H))
    has the logit mean k / sqrt(H) + k covariance k / (2 H); a softmax over the tokens after the sinks, per query head,
    and the mean over a key/value head's query heads follow. Sinks are left out: the selection keeps them anyway. The
    fields are the arguments of `expected_attention`.
    """

    num_queries: ClassVar[int | None] = None
    sinks: int = 4
    future: kv.PositiveInt = 512
    covariance: bool = True
    value_norms: bool = True
    epsilon: kv.NonNegativeFloat = 0.0

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        block, observation = block.clean(), self.require_observation(observation)
        mean, covariance = self._future_queries(block, observation, spec.rope)
        logits = expected_logits(block.k, mean, covariance)
        is_readable = visible_to_next_query(block, spec.rule) & (block.pos >= self.sinks)[:, :, None]
        heads = kv.attention.softmax(jnp.where(is_readable, logits, kv.MASKED_LOGIT), observation.sinks)
        if self.value_norms:
            norms = jnp.sqrt(jnp.square(block.v.astype(jnp.float32)).sum(-1))
            heads = (heads + self.epsilon) * norms[:, :, None]
        return kv.head_scores(heads, heads.mean(2), block)

    def _future_queries(
        self, block: kv.KVBlock, observation: kv.Observation, rope: kv.Rope
    ) -> tuple[kv.Array, kv.Array | None]:
        """Estimates the mean f32[B K G H] and the covariance f32[B K G H H] of future queries."""
        counted, steps = observation.pos >= self.sinks, jnp.arange(self.future, dtype=jnp.int32)
        pre_rope_mean = mean_over_pre_rope(observation, counted, rope, sum_queries)[:, :, :, None]
        mean = rotate_ahead(pre_rope_mean, rope, block, steps)[:, :, :, 0]
        if not self.covariance:
            return mean, None

        def sum_products(q: kv.Array, counts: kv.Array) -> kv.Array:
            deviation = (q - pre_rope_mean) * counts
            return jnp.einsum("bkgqh,bkgqi->bkghi", deviation, deviation)

        covariance = mean_over_pre_rope(observation, counted, rope, sum_products)
        # R C R^T, one side at a time: C is symmetric, so the transpose of R C is C R^T.
        half_rotated = rotate_ahead(covariance, rope, block, steps)
        return mean, rotate_ahead(half_rotated.swapaxes(3, 4), rope, block, steps)


def expected_logits(keys: kv.Array, mean: kv.Array, covariance: kv.Array | None, keys_at_once: int = 256) -> kv.Array:
    """Computes the logarithm of the expected exp of the scaled dot product with keys [B K S H]: f32[B K G S]."""
    H = keys.shape[3]

    def score_key(key: kv.Array) -> kv.Array:
        key = key.astype(jnp.float32)
        logit = jnp.einsum("bkh,bkgh->bkg", key, mean) * H**-0.5
        if covariance is None:
            return logit
        spread = jnp.einsum("bkh,bkghi->bkgi", key, covariance)
        return logit + jnp.einsum("bkgi,bki->bkg", spread, key) / (2 * H)

    return jnp.moveaxis(lax.map(score_key, jnp.moveaxis(keys, 2, 0), batch_size=keys_at_once), 0, 3)


@kv.register_method(example="expected_attention:budget=512", family="eviction after the prompt")
def expected_attention(
    budget: kv.TokenBudget = 1024,
    sinks: int = 4,
    future: int = 512,
    covariance: bool = True,
    value_norms: bool = True,
    epsilon: float = 0.0,
    unit: str = "token",
    per: kv.Scope = "head",
) -> kv.Method:
    """Keeps the prompt tokens that future queries are expected to attend to.

    kvpress' evaluation divides its budget among heads: 'expected_attention:epsilon=0.01 + adakv:rule=kvpress'; alone
    all heads keep the same number.

    Formula:
      score_s = |v_s| mean over a head's query heads of softmax_s(m k_s / sqrt(H) + k_s C k_s / (2 H)), m = R mean(q), C
      = R cov(q) R^T of the prompt's queries before RoPE, R = mean of the next rotations

    Differs:
      kvpress' evaluation runs it over AdaKV, as 'expected_attention:epsilon=0.01 + adakv:rule=kvpress' does; alone
      every head keeps the same number of tokens, as under `ExpectedAttentionPress`. `docs/results.md` has what each
      division keeps. Statistics are of a sequence's own queries as the model makes them, so models that normalize
      queries work too, where kvpress computes them from hidden states; tokens that have left a layer's sliding window
      score 0. A learned sink counts in the softmax. A soft cap does not: the expectation of the exponential of a
      bounded logit has no closed form, so that logits are those before the cap, in which large ones stand out more.

    Args:
      budget, unit, per: as in `make_selection`.
      sinks: as in `make_selection`; they are left out of all statistics (kvpress: 4).
      future: positions ahead over which the rotation of queries is averaged (kvpress: 512).
      covariance: whether the spread of the queries counts, and not their mean alone.
      value_norms: whether scores are multiplied by the norm of the value.
      epsilon: scores are (expected attention + epsilon) |v|.

    Reference:
      Expected Attention, Devoto et al. 2025, arXiv 2510.00636; constants of its public code, kvpress
    """
    scorer = ExpectedAttention(sinks, future, covariance, value_norms, epsilon)
    return kv.Method(select=kv.make_selection(scorer, budget, sinks, unit=unit, per=per))
