"""PyramidKV: SnapKV's choice, with fewer tokens the higher the layer."""

from __future__ import annotations

from kvjax.cache.eviction import budgets, scorers
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.methods.registry import recipe
from kvjax.methods.trial import Trial, selected


@recipe(
    "PyramidKV, Cai et al. 2024, arXiv 2406.02069, section 4; constants of the authors' scripts",
    Trial(
        "pyramidkv:budget=6,window=2,kernel=3,pool=avg", "pyramidkv:budget=100,window=2,kernel=3,pool=avg", selected(6)
    ),
    formula="tokens of layer l fall linearly from 2 b - b / beta to b / beta, b the budget without the window; "
    "scores as in snapkv",
    differs="rule=authors has the integers of the authors' code, rule=peer kvpress' floating-point form.",
    example="pyramidkv:budget=512",
    family="eviction after the prompt",
)
def pyramidkv(
    budget: int = 1024,
    window: int = 8,
    kernel: int = 7,
    pool: str = "max",
    beta: int = 20,
    rule: str = "authors",
    reduce: str = "mean",
    reduce_first: bool = False,
    sinks: int = 0,
    unit: str = "token",
    per: str = "head",
) -> Method:
    """SnapKV's choice with many tokens in the first layers and few in the last, `budget` a layer on average.

    budget: prompt tokens kept per key/value head in the mean of all layers, the window included. beta: how much steeper
    than flat. rule: "authors", integers as in their code (rounding lets the sum exceed the budget), or "peer", kvpress'
    floating-point form. window, kernel, pool, reduce, reduce_first, sinks, unit, per as in `snapkv`.
    """
    scorer = scorers.WindowAttention(window, kernel, pool, reduce, reduce_first)
    return Method(select=make_selection(scorer, budgets.Pyramid(budget, window, beta, rule), sinks, window, unit, per))
