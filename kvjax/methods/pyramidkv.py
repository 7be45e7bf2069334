"""PyramidKV: SnapKV's scores, with fewer tokens the higher the layer."""

from __future__ import annotations

import dataclasses
from typing import Literal

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class Pyramid(kv.Budget):
    """Many tokens in the first layers, few in the last, `tokens` on average. A model of one layer gets `tokens`.

    Args:
      tokens: mean over the layers. For rule "peer" it need not be whole: kvpress' ratio r of a prompt of T tokens is
        T * (1 - r).
      window: the fewest tokens of a layer, normally the scorer's window.
      beta: the last layer gets tokens / beta, the first 2 * tokens - tokens / beta.
      rule: "authors", the integers of the authors' code: the window comes on top of the pyramid, rounding lets the sum
        exceed tokens * layers, and prompts shorter than 2 * (tokens - window) get a flat budget. "peer", kvpress'
        floating-point form: the window is a part of each layer's number, and the budget is flat wherever a layer would
        get less than the window.
      layer: place of the layer among those that the method works in, set by `at`.
      layers: number of these layers, set by `at`.
    """

    tokens: float
    window: kv.NonNegativeInt
    beta: kv.PositiveInt = 20
    rule: Literal["authors", "peer"] = "authors"
    layer: int = 0
    layers: int = 1

    def __post_init__(self):
        kv.check_fields(self)
        if self.tokens <= self.window:
            raise kv.KvjaxError(
                f"a pyramid over a window of {self.window} tokens needs more than these, got budget={self.tokens}; "
                f"use at least {self.window + 1}"
            )
        if self.rule == "authors" and self.tokens != int(self.tokens):
            raise kv.KvjaxError(
                f"the authors' pyramid is of integers, got budget={self.tokens}; use {int(self.tokens)}"
            )

    def at(self, spec: kv.LayerSpec) -> Pyramid:
        return dataclasses.replace(self, layer=spec.place, layers=len(spec.method_layers))

    def num_kept(self, length: int) -> int:
        is_authors = self.rule == "authors"
        # The authors' pyramid stands on the window; kvpress' contains it.
        above = self.window if is_authors else 0
        mean = self.tokens - above
        last = mean // self.beta if is_authors else mean / self.beta
        first = 2 * mean - last
        if first >= length - self.window:  # the first layer cannot keep more, so the last ones get what is left
            first = length - self.window
            last = 2 * mean - first
        if is_authors:
            is_flat = length <= self.tokens or length < 2 * mean
        else:
            is_flat = not length >= first >= last >= self.window
        if is_flat or self.layers == 1:
            return min(length, round(self.tokens))
        step = (first - last) // (self.layers - 1) if is_authors else (first - last) / (self.layers - 1)
        return min(length, round(first - self.layer * step) + above)

    def max_kept(self) -> int | None:
        # From four times the budget on, the length of the prompt no longer limits any layer.
        return self.num_kept(4 * round(self.tokens) + 4 * self.window)


@kv.register_method(example="pyramidkv:budget=512", family="eviction after the prompt")
def pyramidkv(
    budget: int = 1024,
    window: kv.PositiveInt = 8,
    kernel: int = 7,
    pool: Literal["avg", "max"] = "max",
    beta: int = 20,
    rule: Literal["authors", "peer"] = "authors",
    reduce: Literal["mean", "max"] = "mean",
    reduce_first: bool = False,
    sinks: int = 0,
    unit: str = "token",
    per: kv.Scope = "head",
) -> kv.Method:
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
    scorer = kv.WindowAttention(window, kernel, pool, reduce, reduce_first)
    return kv.Method(select=kv.make_selection(scorer, Pyramid(budget, window, beta, rule), sinks, window, unit, per))
