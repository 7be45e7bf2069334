"""PyramidKV: SnapKV's choice, with fewer tokens the higher the layer."""

from __future__ import annotations

from kvjax.cache.eviction import budgets, scorers
from kvjax.cache.eviction.selection import make_selection
from kvjax.cache.method import Method
from kvjax.methods.registry import register_method


@register_method(example="pyramidkv:budget=512", family="eviction after the prompt")
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
    """Selects as SnapKV, with many tokens in the first layers and few in the last, `budget` a layer on average.

    Formula:
      tokens of layer l fall linearly from 2 b - b / beta to b / beta, b the budget without the window; scores as in
      snapkv

    Differs:
      rule=authors has the integers of the authors' code, rule=peer kvpress' floating-point form.

    Args:
      budget: prompt tokens kept per layer and key/value head, the window included, on average over the layers.
      window, kernel, pool, reduce, reduce_first: as in `snapkv`.
      beta: steepness of the pyramid; the last layer gets about budget / beta tokens.
      rule: "authors", integers as in their code (rounding lets the sum exceed the budget), or "peer", as kvpress.
      sinks, unit, per: as in `make_selection`.

    Reference:
      PyramidKV, Cai et al. 2024, arXiv 2406.02069, section 4; constants of the authors' scripts
    """
    scorer = scorers.WindowAttention(window, kernel, pool, reduce, reduce_first)
    return Method(select=make_selection(scorer, budgets.Pyramid(budget, window, beta, rule), sinks, window, unit, per))
