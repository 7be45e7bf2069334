"""Ranked budgets: heads compete for one budget by their tokens' scores, within a layer or over the whole model."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.components import Components, HeadBudgets, LayerBudgets, PromptSelection
from kvjax.cache.eviction.representatives import fraction_of
from kvjax.cache.eviction.selection import Candidates, score_candidates
from kvjax.core.attention import MASKED_LOGIT
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.top_k import top_k_mask
from kvjax.core.types import Array, KVBlock
from kvjax.errors import IncompatibleMethod, KvjaxError
from kvjax.utils.parameter_types import UnitFloat, check_fields


@dataclasses.dataclass(frozen=True)
class ModelRanking(LayerBudgets):
    """Keeps the best units of all heads of all layers, as many as the layers' budgets make together.

    Sinks and recent tokens take no part and stay in every head. Of equal scores the lower layer comes first, then the
    lower head, then the earlier unit.

    Args:
      safe: the fraction of the mean budget that every head keeps in any case, its own best units: AdaKV's safeguard.
      normalise: whether each layer's scores are divided first by the sum of their absolute values, so that layers whose
        scores are large altogether do not take the budget of the others. Norms of keys have a scale of each layer's
        own, and need it.

    Reference:
      KVzip, Kim et al. 2025, arXiv 2505.23416, and the default of its press in kvpress
    """

    safe: UnitFloat = 0.0
    normalise: bool = False
    by_head = True

    __post_init__ = check_fields

    def measure(self, selection: PromptSelection, block: KVBlock, observation: Observation | None) -> Candidates:
        return self.rescale(score_candidates(selection, block, observation))

    def rescale(self, candidates: Candidates) -> Candidates:
        """Brings one layer's scores to the scale on which layers are compared."""
        if not self.normalise:
            return candidates
        # A unit at MASKED_LOGIT or below is the last to stay, whatever the others score, and has no part in their sum.
        is_scored = candidates.scores > MASKED_LOGIT
        head_sums = jnp.where(is_scored, jnp.abs(candidates.scores), 0.0).sum(-1, keepdims=True)
        scaled = candidates.scores / jnp.maximum(over_heads.sum(head_sums), 1e-30)
        return candidates._replace(scores=jnp.where(is_scored, scaled, candidates.scores))

    def allocate_tokens(self, selection: PromptSelection, measures: Candidates, lengths: Array) -> Array:
        L, B, K, U = measures.scores.shape
        scores = jnp.moveaxis(measures.scores, 1, 0).reshape(B, L * K, U)
        quota = jnp.repeat(measures.quota.T, K, 1)  # i32[B L*K]
        allowed = scores > -jnp.inf
        safe = fraction_of(self.safe, quota)
        # Representatives take places of all heads alike, so that every head must have as many of its own.
        if selection.representatives is not None:
            safe = jnp.maximum(safe, fraction_of(selection.representatives.share, quota))
        # An infinite score has a head's safe units taken first, and counted in the same budget.
        ranked = jnp.where(top_k_mask(scores, allowed, safe), jnp.inf, scores)
        best = top_k_mask(ranked.reshape(B, -1), allowed.reshape(B, -1), quota.sum(-1)).reshape(B, L, K, U)
        num_units = jnp.moveaxis(best.sum(-1, dtype=jnp.int32), 1, 0)
        return measures.always[:, :, None] + num_units * selection.select.granularity.size

    def check(self, components: Components, budgets: tuple[int | None, ...]) -> None:
        if components.side_store is None or components.side_store.head_budgets is None:
            raise IncompatibleMethod(
                "a ranking over the model (component `layer_budgets`) gives heads unequal lengths and needs a store "
                "for them in component `side_store`; write it over a selection, as in 'snapkv:budget=512 + "
                "adakv:scope=model'"
            )
        assert components.select is not None
        select, scorer = components.select, components.select.scorer
        if not (scorer.is_comparable or self.normalise):
            raise IncompatibleMethod(
                f"scores of {type(scorer).__name__} (component `select`) are on a scale of each layer's own and cannot "
                "be ranked over the model as they are; give normalise=true, which divides each layer's scores by the "
                "sum of their absolute values, or divide the budget within each layer (scope=layer), or take a scorer "
                "of attention weights, as in 'snapkv:budget=512 + adakv:scope=model'"
            )
        # A budget in tokens that sinks and recent tokens use up in every layer leaves nothing to rank.
        always, size = select.sinks + select.recent, select.granularity.size
        bounds = [tokens for tokens in budgets if tokens is not None]
        if len(bounds) == len(budgets) and max(bounds) < always + size:
            protected = ", ".join(f"{name}={count}" for name, count in select.protected_counts.items()) or "no sinks"
            raise KvjaxError(
                f"budget={max(bounds)} is what a head keeps in the mean, and {always} tokens stay in every head "
                f"({protected}), so that nothing is left to rank over the model; give budget>={always + size}, or "
                "protect fewer"
            )


@dataclasses.dataclass(frozen=True)
class BestOfLayer(HeadBudgets):
    """Keeps the best units of all heads of a layer; no head is sure of any (KVzip with layerwise budgets)."""

    def allocate(self, scores: Array, allowed: Array, num_units: Array, num_always: Array) -> Array:
        return count_best(scores, allowed, num_units)


@dataclasses.dataclass(frozen=True)
class BestOfModel(BestOfLayer):
    """The rule of the pages under a `ModelRanking`, whose counts replace it once all layers have seen the prompt.

    A memory plan, which is made before that, counts as if each layer kept a budget of its own.
    """


def count_best(scores: Array, allowed: Array, quota: Array) -> Array:
    """Counts each head's part of the K * quota best units of all heads.

    Of equal scores the earlier unit comes first, then the lower head.

    Args:
      scores: f32[B K U].
      allowed: bool[B U], the units that take part.
      quota: i32[B], units per head on average.

    Returns:
      i32[B K].
    """
    B, K, U = scores.shape
    by_unit = scores.swapaxes(1, 2).reshape(B, U * K)  # heads innermost, since ties go to the lower index
    best = top_k_mask(by_unit, jnp.repeat(allowed, K, -1), K * quota)
    return best.reshape(B, U, K).sum(1, dtype=jnp.int32)
