"""Compactor: keeps the tokens whose keys stand out, or to which queries attend without a causal mask."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.methods.leverage_score import LeverageScore
from kvjax.methods.noncausal_attention import NoncausalAttention


@dataclasses.dataclass(frozen=True)
class Compactor(kv.Scorer):
    """Adds the scores of leverage, times a weight, to those of attention without a causal mask (2507.08143).

    Args:
      leverage, attention: the two scorers.
      blend: weight of the leverage; None for the fraction of the sequence's tokens that `budget` evicts.
      budget: of the selection.
    """

    num_queries: ClassVar[int | None] = None
    leverage: LeverageScore
    attention: NoncausalAttention
    blend: kv.NonNegativeFloat | None
    budget: kv.Budget

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        blend = self.blend
        if blend is None:
            length = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
            num_kept = jnp.asarray(self.budget.num_kept_by_length(block.pos.shape[2]))[length]
            kept = num_kept.astype(jnp.float32) / jnp.maximum(length, 1).astype(jnp.float32)
            blend = (1.0 - kept)[:, None, None]
        # Empty slots are -inf in both, and would be NaN under a weight of 0.
        leverage = jnp.where(block.pos >= 0, self.leverage.scores(block, None, spec).per_kv_head, 0.0)
        attention = self.attention.scores(block, observation, spec).per_kv_head
        return kv.token_scores(blend * leverage + attention, block)


@kv.register_method(example="compactor:budget=512", family="eviction after the prompt")
def compactor(
    budget: kv.TokenBudget = 1024,
    blend: str = "evicted",
    chunk: int = 256,
    sketch: int = 48,
    sinks: int = 8,
    recent: int = 4,
    seed: int = 0,
    unit: str = "token",
    per: kv.Scope = "head",
) -> kv.Method:
    """Keeps the prompt tokens with outlying keys, and those that are attended to from both sides.

    It looks at no question: queries of the whole prompt take part alike. The authors rank the tokens of all heads of a
    layer, as 'compactor + adakv' does.

    Formula:
      score_s = blend z(leverage of k_s before RoPE) + z(attention to s within its chunk, without a causal mask, |v_s|),
      z standardized over the layer

    Differs:
      As in 'leverage_score' and 'noncausal_attention'. The weight is the fraction that is evicted, as in kvpress
      (CompactorPress); the authors' code has 0.5. Under `+ recompress` and a budget that layers divide it stays that of
      the prompt and of the method's own budget.

    Args:
      budget, unit, per: as in `make_selection`.
      blend: weight of the leverage, a number of 0 or more, or "evicted", the fraction of the prompt that the budget
        evicts.
      chunk: as in `noncausal_attention`.
      sketch, seed: as in `leverage_score`.
      sinks, recent: as in `make_selection`; they are left out of all statistics (kvpress: 8 and 4).

    Reference:
      Compactor, Chari & Van Durme 2025, arXiv 2507.08143; constants of kvpress
    """
    try:
        weight = None if blend == "evicted" else float(blend)
    except ValueError:
        raise kv.KvjaxError(
            f"blend is a number of 0 or more, as in blend=0.5, or 'evicted', got {blend!r:.60}"
        ) from None
    attention = NoncausalAttention(chunk, sinks, recent)
    select = kv.make_selection(attention, budget, sinks, recent, unit, per)
    scorer = Compactor(LeverageScore(sketch, seed, sinks, recent), attention, weight, select.budget)
    return kv.Method(select=dataclasses.replace(select, scorer=scorer))
