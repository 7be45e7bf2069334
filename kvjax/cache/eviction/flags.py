"""Flags: heads that keep what is flagged, few tokens or many, where a budget only says how many it may be at most."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.eviction.budget_allocation import HeadBudgets
from kvjax.core.top_k import top_k_mask
from kvjax.core.types import Array


@dataclasses.dataclass(frozen=True)
class ThresholdBudgets(HeadBudgets):
    """Each head keeps the units whose scores are above a number, however many these are.

    Where the heads of a layer together flag more units than their budgets hold, the best of them all stay; of equals
    the earlier unit comes first, then the lower head. Memory is that of the budget: shapes are known beforehand.
    """

    above: float

    def allocate(self, scores: Array, allowed: Array, quota: Array, beside: Array) -> Array:
        B, K, U = scores.shape
        flagged = allowed[:, None] & (scores > self.above)
        scores, flagged = (x.swapaxes(1, 2).reshape(B, U * K) for x in (scores, flagged))
        return top_k_mask(scores, flagged, K * quota).reshape(B, U, K).sum(1, dtype=jnp.int32)
