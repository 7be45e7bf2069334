"""SnapKV: the tokens that the prompt's last queries attend to."""

from __future__ import annotations

from typing import Literal

from kvjax import method_api as kv


@kv.register_method(example="snapkv:budget=512", family="eviction after the prompt")
def snapkv(
    budget: kv.TokenBudget = 1024,
    window: kv.PositiveInt = 32,
    kernel: int = 7,
    pool: Literal["avg", "max"] = "max",
    reduce: Literal["mean", "max"] = "mean",
    reduce_first: bool = False,
    sinks: int = 0,
    unit: str = "token",
    per: kv.Scope = "head",
) -> kv.Method:
    """Keeps the prompt tokens that its last queries attend to most, and the window of these queries.

    Tokens are evicted once, when the prompt ends; decoded tokens are all kept.

    Formula:
      score_s = mean over the window's queries of softmax(q k_s), pooled over neighbors; per key/value head the mean
      over its query heads

    Differs:
      Grouped heads select together by their mean, as in kvpress; the authors' code (FasterDecoding/SnapKV) repeats keys
      to query heads first.

    Args:
      budget: as in `make_selection`; the window is included.
      window: last queries of the prompt that score the others; their own tokens always stay.
      kernel: neighbors over which a token's attention is pooled, odd.
      pool: "max" or "avg" (the class in the authors' code has window 64, kernel 5, avg).
      reduce: "mean" or "max" over the query heads of a key/value head.
      reduce_first: whether to reduce before pooling.
      sinks, unit, per: as in `make_selection`.

    Reference:
      SnapKV, Li et al. 2024, arXiv 2404.14469, section 4; constants of its LongBench runs
    """
    return kv.Method(
        select=kv.make_selection(
            kv.WindowAttention(window, kernel, pool, reduce, reduce_first), budget, sinks, window, unit, per
        )
    )
