"""HeadKV: divides a budget among the heads of all layers by a table of their importance."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import numpy as np

from kvjax import method_api as kv
from kvjax.cache.eviction.head_budgets import HeadTableBudgets, HeadTokens, MeanOfHeads, scores_of_all_heads


@dataclasses.dataclass(frozen=True)
class HeadWeightBudgets(HeadTableBudgets):
    """Gives each head a base, a part by weight of a pool of all layers and heads, and its window.

    From the b = budget - window tokens of each head, floor(b / beta) go into the pool, and the others are the base of
    every head; numbers are rounded half to even, as in the authors' code.

    Args:
      given: a file of `HeadWeights`.
      budget: tokens of a head in the mean, the window included.
      window: last tokens, which always stay.
      beta: 1 puts all tokens into the pool.
    """

    given: kv.TableFile
    budget: int
    window: int
    beta: Annotated[float, kv.Within("[1, inf)")]

    def __post_init__(self):
        kv.check_fields(self)
        if self.budget <= self.window:
            raise kv.KvjaxError(
                f"a budget of {self.budget} tokens leaves nothing before the window of {self.window}; use more"
            )

    def at(self, spec: kv.LayerSpec) -> HeadTokens:
        weights = scores_of_all_heads(self.given, spec, "weights")
        if weights.min() < 0 or not weights.any():
            raise kv.KvjaxError(
                f"weights of heads must be 0 or more and not all 0, got {weights.min():g} to {weights.max():g} in "
                f"{self.given.path}; make the table anew"
            )
        each = self.budget - self.window
        pooled = int(each // self.beta)
        tokens = np.round(weights / weights.sum() * pooled * weights.size + each - pooled)
        return HeadTokens(tuple(self.window + int(n) for n in tokens[spec.place]))


@kv.register_method(example="headkv:budget=256", family="heads of unequal length")
def headkv(
    budget: int = 128,
    beta: float = 1.01,
    window: kv.PositiveInt = 32,
    kernel: int = 7,
    pool: Literal["avg", "max"] = "max",
    table: str = "shipped",
    page: int = 16,
) -> kv.Method:
    """Gives important heads of the whole model many of the prompt's tokens, and the others few.

    Formula:
      b = budget - window, p = floor(b / beta); head h keeps its window and round(w_h / sum w * p L K + b - p) more, the
      best by SnapKV's score

    Differs:
      The table is of key/value heads, and so are the numbers, where the authors' are of query heads. Any table works;
      the authors' retrieval and reasoning scores need questions about needles, which no calibration here asks.

    Args:
      budget: prompt tokens kept per layer and key/value head, on average over all heads, the window included.
      beta: at 1 all of the budget is divided by importance; the larger, the more all heads keep alike (1.01 in
        KVCache-Factory; the authors try 1.005 to 10).
      window, kernel, pool: as in `snapkv`.
      table: a file of kind `heads`, with a weight for each key/value head; "shipped" for the shipped model's.
      page: slots of a page, in which heads of unequal length are stored.

    Reference:
      HeadKV, Fu et al. 2024, arXiv 2410.19258, section 3; its public code, FYYFU/HeadKV
    """
    rule = HeadWeightBudgets(kv.HeadWeights.table_file(table), budget, window, beta)
    scorer = kv.WindowAttention(window, kernel, pool)
    return kv.Method(
        select=kv.make_selection(scorer, MeanOfHeads(rule), 0, window), side_store=kv.PagedHeads(rule, page)
    )
