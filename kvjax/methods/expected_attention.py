"""Expected Attention: keeps the tokens that future queries attend to, if these are like the prompt's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.future_queries import mean_over_pre_rope, rotate_ahead, sum_queries, visible_to_next_query


@kv.register_table_kind("query_statistics")
@dataclasses.dataclass(frozen=True)
class QueryStatistics(kv.TableKind):
    """Mean and covariance of each query head's queries before RoPE: `mean` f32[K G H], `covariance` f32[K G H H].

    Args:
      sinks: first tokens of each text, whose queries do not count (kvpress: 4).
    """

    sinks: kv.NonNegativeInt = 4
    num_queries = None

    __post_init__ = kv.check_fields

    def count(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> dict[str, kv.Array]:
        assert observation is not None
        counted = (observation.pos >= self.sinks)[:, None, None, :, None]
        q = jnp.where(counted, spec.rope.unrotate_queries(observation.q, observation.pos), 0.0)
        return {
            "tokens": counted.sum((3, 4), dtype=jnp.float32),  # [B 1 1]
            "sum": q.sum(3),
            "products": jnp.einsum("bkgqh,bkgqi->bkghi", q, q, precision=lax.Precision.HIGHEST),
        }

    def arrays(self, counted: dict[str, np.ndarray], spec: kv.LayerSpec) -> Mapping[str, np.ndarray]:
        tokens = counted["tokens"].item()
        if tokens < 2:
            raise kv.KvjaxError(
                f"{int(tokens)} tokens of these texts stand behind the first {self.sinks}, and a covariance needs 2; "
                "give longer texts"
            )
        mean = counted["sum"] / tokens
        # Over tokens - 1, as kvpress has it.
        covariance = (counted["products"] - tokens * mean[..., None] * mean[..., None, :]) / (tokens - 1)
        return {"mean": mean.astype(np.float32), "covariance": covariance.astype(np.float32)}

    @staticmethod
    def read_published(file: kv.PublishedFile, spec: kv.LayerSpec) -> Sequence[Mapping[str, np.ndarray]]:
        L, K, G, H = spec.num_layers, spec.num_kv_heads, spec.num_groups, spec.head_dim
        mean = file.take("query_mean", L, K * G, H).reshape(L, K, G, H)
        covariance = file.take("query_cov", L, K * G, H, H).reshape(L, K, G, H, H)
        return [{"mean": m, "covariance": c} for m, c in zip(mean, covariance, strict=True)]


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
        steps = jnp.arange(self.future, dtype=jnp.int32)
        mean, covariance = self._pre_rope_queries(observation, spec, block.k.shape[1])
        mean = rotate_ahead(mean[:, :, :, None], spec.rope, block, steps)[:, :, :, 0]
        if covariance is not None:
            # R C R^T, one side at a time: C is symmetric, so the transpose of R C is C R^T.
            half_rotated = rotate_ahead(covariance, spec.rope, block, steps)
            covariance = rotate_ahead(half_rotated.swapaxes(3, 4), spec.rope, block, steps)
        logits = expected_logits(block.k, mean, covariance)
        is_readable = visible_to_next_query(block, spec.rule) & (block.pos >= self.sinks)[:, :, None]
        heads = kv.attention.softmax(jnp.where(is_readable, logits, kv.MASKED_LOGIT), observation.sinks)
        if self.value_norms:
            norms = jnp.sqrt(jnp.square(block.v.astype(jnp.float32)).sum(-1))
            heads = (heads + self.epsilon) * norms[:, :, None]
        return kv.head_scores(heads, heads.mean(2), block)

    def _pre_rope_queries(
        self, observation: kv.Observation, spec: kv.LayerSpec, num_local: int
    ) -> tuple[kv.Array, kv.Array | None]:
        """Estimates the mean f32[B K G H] and the covariance f32[B K G H H] of queries before RoPE."""
        counted = observation.pos >= self.sinks
        mean = mean_over_pre_rope(observation, counted, spec.rope, sum_queries)
        if not self.covariance:
            return mean, None

        def sum_products(q: kv.Array, counts: kv.Array) -> kv.Array:
            deviation = (q - mean[:, :, :, None]) * counts
            return jnp.einsum("bkgqh,bkgqi->bkghi", deviation, deviation)

        return mean, mean_over_pre_rope(observation, counted, spec.rope, sum_products)


@dataclasses.dataclass(frozen=True)
class CalibratedExpectedAttention(ExpectedAttention):
    """`ExpectedAttention` whose queries are those of other texts, as kvpress' `ExpectedAttentionStatsPress` has them.

    Args:
      given: a file of `QueryStatistics`.
    """

    given: kv.TableFile = dataclasses.field(kw_only=True)
    num_queries: ClassVar[int | None] = 1  # not for the query itself, but because learned sinks come with it

    def _pre_rope_queries(
        self, observation: kv.Observation, spec: kv.LayerSpec, num_local: int
    ) -> tuple[kv.Array, kv.Array | None]:
        mean_shape = spec.num_kv_heads, spec.num_groups, spec.head_dim
        shapes = {"mean": mean_shape} | ({"covariance": (*mean_shape, spec.head_dim)} if self.covariance else {})
        all_heads = (jnp.asarray(x, jnp.float32) for x in self.given.layer_arrays(spec, **shapes).values())
        own = (kv.over_heads.local_part(x, num_local)[None] for x in all_heads)
        mean, *covariance = (jnp.broadcast_to(x, (len(observation.q), *x.shape[1:])) for x in own)
        return mean, covariance[0] if covariance else None


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
    table: str = "",
    recent: int = 0,
) -> kv.Method:
    """Keeps the prompt tokens that future queries are expected to attend to.

    kvpress' evaluation divides its budget among heads: 'expected_attention:epsilon=0.01 + adakv:rule=kvpress'; alone
    all heads keep the same number.

    Formula:
      score_s = |v_s| mean over a head's query heads of softmax_s(m k_s / sqrt(H) + k_s C k_s / (2 H)), m = R mean(q), C
      = R cov(q) R^T of the prompt's queries before RoPE, R = mean of the next rotations

    Differs:
      kvpress' evaluation runs it over AdaKV, as 'expected_attention:epsilon=0.01 + adakv:rule=kvpress' does; alone
      every head keeps the same number of tokens, as under `ExpectedAttentionPress`. `docs/divisions.md` has what each
      division keeps. Statistics are of a sequence's own queries as the model makes them, so models that normalize
      queries work too, where kvpress computes them from hidden states; tokens that have left a layer's sliding window
      score 0. A learned sink counts in the softmax. A soft cap does not: the expectation of the exponential of a
      bounded logit has no closed form, so that logits are those before the cap, in which large ones stand out more.
      kvpress' `ExpectedAttentionStatsPress` finds its table by the model's name; here it is a file that you give.

    Args:
      budget, unit, per, recent: as in `make_selection`.
      sinks: as in `make_selection`; they are left out of all statistics (kvpress: 4).
      future: positions ahead over which the rotation of queries is averaged (kvpress: 512).
      covariance: whether the spread of the queries counts, and not their mean alone.
      value_norms: whether scores are multiplied by the norm of the value.
      epsilon: scores are (expected attention + epsilon) |v|.
      table: a file of kind `query_statistics`, for the queries of other texts in place of the prompt's own: made by
        `kvjax calibrate query_statistics`, or one that kvpress' authors published, the `model.safetensors` of a
        repository `alessiodevoto/exp_att_stats_..`; "shipped" for the shipped model's.

    Reference:
      Expected Attention, Devoto et al. 2025, arXiv 2510.00636; constants of its public code, kvpress
    """
    settings = sinks, future, covariance, value_norms, epsilon
    scorer = ExpectedAttention(*settings)
    if table:
        scorer = CalibratedExpectedAttention(*settings, given=QueryStatistics.table_file(table))
    return kv.Method(select=kv.make_selection(scorer, budget, sinks, recent, unit, per))
