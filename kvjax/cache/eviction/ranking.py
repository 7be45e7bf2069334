"""One budget for several heads: a ranking of the tokens of all heads of a layer, or of all heads of all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from kvjax.cache.eviction.budget_allocation import HeadBudgets, LayerBudgets
from kvjax.cache.eviction.granularity import top
from kvjax.cache.eviction.representatives import fraction_of
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention import MASKED_LOGIT
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.types import Array, KVBlock
from kvjax.errors import IncompatibleMethod, KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer
    from kvjax.cache.eviction.selection import Selection


class Candidates(NamedTuple):
    """The units of one layer that take part in the ranking, and what the layer would keep by itself."""

    scores: Array  # f32[B K U], -inf for what is no whole unit of the sequence
    quota: Array  # i32[B], units that each head would keep if all kept equally many
    always: Array  # i32[B], tokens of each head that stay in any case: sinks, recent ones and an incomplete unit


@dataclasses.dataclass(frozen=True)
class ModelRanking(LayerBudgets):
    """The best units of all heads of all layers stay, as many as the layers' budgets make together.

    This is the rule by which KVzip divides its budget (Kim et al. 2025, arXiv 2505.23416, and kvpress' default).
    Sinks and recent tokens take no part and stay in every head. Of equal scores the lower layer comes first, then the
    lower head, then the earlier unit.

    Attributes:
      safe: the fraction of the mean budget that every head keeps in any case, its own best units: AdaKV's safeguard.
      normalise: whether each layer's scores are divided first by the sum of their absolute values, so that layers whose
        scores are large altogether do not take the budget of the others. Norms of keys have a scale of each layer's
        own, and need it.
    """

    safe: float = 0.0
    normalise: bool = False
    by_head = True

    def __post_init__(self):
        if not 0 <= self.safe <= 1:
            raise KvjaxError(
                f"the safe fraction of a budget lies in [0, 1], got {self.safe}; 1 gives all heads the same"
            )

    def measure(self, layer: MethodLayer, block: KVBlock, observation: Observation | None) -> Candidates:
        assert layer.method.select is not None
        return self.rescale(layer.method.select.candidates(block, observation, layer.spec))

    def rescale(self, found: Candidates) -> Candidates:
        """One layer's candidates on the scale on which layers are compared."""
        if not self.normalise:
            return found
        # A unit at MASKED_LOGIT or below is the last to stay, whatever the others score, and has no part in their sum.
        scored = found.scores > MASKED_LOGIT
        of_heads = jnp.where(scored, jnp.abs(found.scores), 0.0).sum(-1, keepdims=True)
        scaled = found.scores / jnp.maximum(over_heads.sum(of_heads), 1e-30)
        return found._replace(scores=jnp.where(scored, scaled, found.scores))

    def allocate_tokens(self, layer: MethodLayer, measures: Candidates, lengths: Array) -> Array:
        assert layer.method.select is not None
        L, B, K, U = measures.scores.shape
        scores = jnp.moveaxis(measures.scores, 1, 0).reshape(B, L * K, U)
        quota = jnp.repeat(measures.quota.T, K, 1)  # i32[B L*K]
        allowed = scores > -jnp.inf
        safe = fraction_of(self.safe, quota)
        # Representatives take places of all heads alike, so that every head must have as many of its own.
        if layer.method.representatives is not None:
            safe = jnp.maximum(safe, fraction_of(layer.method.representatives.share, quota))
        first = jnp.where(top(scores, allowed, safe), jnp.inf, scores)
        best = top(first.reshape(B, -1), allowed.reshape(B, -1), quota.sum(-1)).reshape(B, L, K, U)
        won = jnp.moveaxis(best.sum(-1, dtype=jnp.int32), 1, 0)
        return measures.always[:, :, None] + won * layer.method.select.unit.size

    def check(self, layer: MethodLayer) -> None:
        method = layer.method
        if method.side_store is None or not method.side_store.by_head:
            raise IncompatibleMethod(
                "a ranking over the model (slot `layer_budgets`) gives heads unequal lengths and needs a store for "
                "them in slot `side_store`; write it as a component over a selection, as in 'snapkv:budget=512 + "
                "adakv:scope=model'"
            )
        assert method.select is not None
        scorer = method.select.scorer
        if not (scorer.comparable or self.normalise):
            raise IncompatibleMethod(
                f"scores of {type(scorer).__name__} (slot `select`) are on a scale of each layer's own and cannot be "
                "ranked over the model as they are; give normalise=true, which divides each layer's scores by the sum "
                "of their absolute values, or divide the budget within each layer (scope=layer), or take a scorer of "
                "attention weights, as in 'snapkv:budget=512 + adakv:scope=model'"
            )
        self._check_budget(method.select, layer.budgets)

    def _check_budget(self, select: Selection, budgets: Sequence[int | None]) -> None:
        """Raises KvjaxError for a budget in tokens of which sinks and recents leave nothing to rank in any layer."""
        always, size = select.sinks + select.recent, select.unit.size
        most = [tokens for tokens in budgets if tokens is not None]
        if len(most) == len(budgets) and max(most) < always + size:
            raise KvjaxError(
                f"{select.budget} keeps {max(most)} tokens of a head in the mean, and {always} sinks and recents stay "
                f"in every head, so that nothing is left to rank over the model; raise the budget to at least "
                f"{always + size} tokens or protect fewer"
            )


@dataclasses.dataclass(frozen=True)
class BestOfLayer(HeadBudgets):
    """The best units of all heads of a layer stay, and no head keeps any in any case (KVzip with layerwise budgets)."""

    def allocate(self, scores: Array, allowed: Array, quota: Array, beside: Array) -> Array:
        return count_best(scores, allowed, quota)


@dataclasses.dataclass(frozen=True)
class BestOfModel(BestOfLayer):
    """What `ModelRanking` says each head keeps; it stands in `Pages` beside it.

    A plan, which is made before any layer has seen the prompt, counts as if each layer kept a budget of its own.
    """


def count_best(scores: Array, allowed: Array, quota: Array) -> Array:
    """i32[B K]: how many of the K * quota best units of all heads are each head's.

    Of equal scores the earlier unit comes first, then the lower head.

    Args:
      scores: f32[B K U].
      allowed: bool[B U], the units that take part.
      quota: i32[B], units per head in the mean.
    """
    B, K, U = scores.shape
    by_unit = scores.swapaxes(1, 2).reshape(B, U * K)  # heads side by side: of equal units the earlier one comes first
    best = top(by_unit, jnp.repeat(allowed, K, -1), K * quota)
    return best.reshape(B, U, K).sum(1, dtype=jnp.int32)


class Counted(HeadBudgets):
    """What each head keeps is known: i32[B K] tokens, of all heads of the layer; only made while a layer is traced."""

    def __init__(self, tokens: Array, size: int):
        self.tokens, self.size = tokens, size

    def others(self, spec: LayerSpec) -> int:
        """Those of all heads of all layers."""
        return spec.num_layers * spec.num_kv_heads - 1

    def allocate_local(self, scores: Array, allowed: Array, quota: Array, beside: Array) -> Array:
        """i32[B K] units of the heads on this device, beside those that stay in any case; see `HeadBudgets`."""
        here = scores.shape[1]
        first = over_heads.first_head(here)
        mine = jnp.take(self.tokens, first + jnp.arange(here, dtype=jnp.int32), axis=1)
        return mine // self.size - beside[:, None]
