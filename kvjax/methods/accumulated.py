"""The tokens that received most attention in the prompt."""

from __future__ import annotations

from typing import Literal

from kvjax import method_api as kv


@kv.register_method(example="accumulated:budget=512,recent=256", family="eviction after the prompt")
def accumulated(
    budget: kv.TokenBudget = 1024,
    recent: int = 8,
    normalise: Literal["none", "visible"] = "none",
    decay: float = 1.0,
    sinks: int = 0,
    unit: str = "token",
    per: kv.Scope = "head",
) -> kv.Method:
    """Keeps the prompt tokens that received most attention from all of the prompt's queries, and the recent tokens.

    The method of the H2O paper evicts at every step: see `h2o`.

    Formula:
      score_s = sum over the prompt's queries t >= s of decay^(T - 1 - t) softmax(q_t k_s), mean over a head's query
      heads

    Differs:
      No difference from KVCache-Factory's H2O is known; normalise=visible is kvpress' ObservedAttentionPress.

    Args:
      budget, recent, sinks, unit, per: as in `make_selection`.
      normalise: "none", the sum over all queries (KVCache-Factory's H2O), or "visible", that sum divided by the number
        of queries that could see the token (kvpress' observed attention, there with recent=0).
      decay: factor by which an older query counts less, A2SF's forgetting factor.

    Reference:
      H2O in its prompt form (KVCache-Factory, kvpress); Zhang et al. 2023, arXiv 2306.14048; A2SF, 2407.20485
    """
    scorer = kv.AccumulatedAttention(normalise, decay)
    return kv.Method(select=kv.make_selection(scorer, budget, sinks, recent, unit, per))
