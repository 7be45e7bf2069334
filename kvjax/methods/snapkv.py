"""SnapKV: the tokens that the prompt's last queries attend to."""

from __future__ import annotations

from kvjax.cache.eviction import scorers
from kvjax.cache.eviction.budgets import TokenBudget
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Trial, selected


@recipe(
    "SnapKV, Li et al. 2024, arXiv 2404.14469, section 4; constants of its LongBench runs",
    Trial("snapkv:budget=6,window=2,kernel=3", "snapkv:budget=100,window=2,kernel=3", selected(6)),
    formula="score_s = mean over the window's queries of softmax(q k_s), pooled over neighbours; per key/value "
    "head the mean over its query heads",
    differs="Grouped heads choose together by their mean, as in kvpress; the authors' code repeats keys to "
    "query heads first.",
    example="snapkv:budget=512",
    family="eviction after the prompt",
)
def snapkv(
    budget: TokenBudget = 1024,
    window: int = 32,
    kernel: int = 7,
    pool: str = "max",
    reduce: str = "mean",
    reduce_first: bool = False,
    sinks: int = 0,
    unit: str = "token",
    per: str = "head",
) -> Method:
    """After the prompt each head keeps its window and the tokens that the window's queries attend to most, pooled.

    budget: prompt tokens kept per layer and key/value head, the window included, or a share of each prompt such as 25%;
    what is decoded is kept too, one row a token. window, kernel, pool: the last queries, and the pooling over
    neighbours, "max" or "avg" (the class in the authors' code: 64, 5, avg). reduce, reduce_first: over a key/value
    head's query heads, mean or max, before or after pooling. unit: "token", or "chunk8", "page32" and the like. per:
    "head", or "layer" for one set for all heads.
    """
    return Method(
        select=make_selection(
            scorers.WindowAttention(window, kernel, pool, reduce, reduce_first), budget, sinks, window, unit, per
        )
    )
