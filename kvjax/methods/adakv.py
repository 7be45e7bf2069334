"""AdaKV: gives a layer's budget to the heads whose attention is most dispersed."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Literal

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.eviction.ranking import BestOfModel, ModelRanking, count_best


@dataclasses.dataclass(frozen=True)
class AdaKV(kv.HeadBudgets):
    """Divides a layer's budget by how many of its best units each head has (Feng et al. 2024, arXiv 2407.11550).

    The K * quota best units of all heads together determine each head's count; ties go to the earlier unit, then to the
    lower head.

    Args:
      alpha: fraction of the budget that is the same for all heads.
      rule: "adakv", the rest is divided by these counts, by the largest remainder, so that the sum is K * quota;
        "kvpress", the best floor(alpha * n) of the n tokens that a head keeps in the mean, window and sinks included,
        are safe, and the best of all others fill the rest.
      normalise: whether a head's scores are multiplied by the fraction of their sum that its own best `quota` units
        have (by default in the authors' code, not in the paper); scores must not be negative then.
    """

    alpha: kv.UnitFloat = 0.2
    rule: Literal["adakv", "kvpress"] = "adakv"
    normalise: bool = False

    __post_init__ = kv.check_fields

    def allocate(self, scores: kv.Array, allowed: kv.Array, quota: kv.Array, num_always: kv.Array) -> kv.Array:
        if self.normalise:
            # A head whose attention is spread over many units wins fewer of the layer's.
            sums = jnp.where(allowed[:, None], scores, 0.0)
            best = jnp.where(kv.top_k_mask(sums, allowed[:, None], quota), sums, 0.0)
            scores = scores * (best.sum(-1, keepdims=True) / jnp.maximum(sums.sum(-1, keepdims=True), 1e-30))
        if self.rule == "kvpress":
            safe = jnp.clip(kv.fraction_of(self.alpha, quota + num_always) - num_always, 0, quota)
            return count_best(jnp.where(kv.top_k_mask(scores, allowed[:, None], safe), jnp.inf, scores), allowed, quota)
        num_won = count_best(scores, allowed, quota)
        # (1 - alpha) * num_won + alpha * quota, in integers with alpha = n / d: remainders that are equal stay equal,
        # and the sum is exact.
        n, d = Fraction(self.alpha).limit_denominator(1000).as_integer_ratio()
        whole, remainder = jnp.divmod(n * quota[:, None] + (d - n) * num_won, d)
        left = num_won.shape[1] * quota - whole.sum(-1, dtype=jnp.int32)
        one_more = kv.top_k_mask(remainder.astype(jnp.float32), jnp.ones(whole.shape, bool), left)
        return whole + one_more.astype(jnp.int32)


@kv.register_method(example="snapkv:budget=256 + adakv", family="component over a selection")
def adakv(
    alpha: float = 0.2,
    rule: Literal["adakv", "kvpress"] = "adakv",
    normalise: bool = False,
    page: int = 16,
    scope: Literal["layer", "model"] = "layer",
) -> kv.Method:
    """Divides a layer's budget, and its bytes, among its heads by the scores of an eviction method.

    Use it as in 'snapkv:budget=256 + adakv'. The window and the sinks stay in every head.

    Formula:
      budget of head h = window + (1 - alpha) c_h + alpha b, b = budget - window, c_h: how many of the K b best tokens
      of all heads belong to head h

    Differs:
      The authors' code rounds each head's budget, so that a layer keeps a few tokens more or less than its budget; here
      the heads with the largest remainders are rounded up, and the total is exact.

    Args:
      alpha: fraction of each budget that all heads get alike.
      rule: "adakv", or "kvpress", where that fraction goes to each head's best tokens; see `AdaKV`.
      normalise: whether heads are weighted first; see `AdaKV`. With scope=model it divides each layer's scores by the
        sum of their absolute values, which scores on a scale of each layer's own need, such as those of `keynorm`.
      page: slots of a page, in which heads of unequal length are stored. The groups of a quantizer that span tokens
        must divide it, as in 'adakv:page=32 + kivi:group=32'.
      scope: "layer", or "model" for one ranking over all heads of all layers, as KVzip divides its budget. With
        "model", alpha is the guaranteed fraction as under rule "kvpress", and bytes are planned as an upper
        bound.

    Reference:
      AdaKV, Feng et al. 2024, arXiv 2407.11550; the rule of its public code, FFY0/AdaKV
    """
    head_budgets = AdaKV(alpha, rule, normalise)
    if scope == "layer":
        return kv.Method(side_store=kv.PagedHeads(head_budgets, page))
    if rule != "adakv":
        raise kv.KvjaxError(
            f"rule of adakv divides a layer's budget among its heads; leave rule={rule!r} out of scope=model"
        )
    return kv.Method(side_store=kv.PagedHeads(BestOfModel(), page), layer_budgets=ModelRanking(alpha, normalise))
