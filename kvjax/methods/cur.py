"""CUR: keeps the tokens whose keys and values are large among those of their neighbors."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from kvjax import method_api as kv

MIN_SUM = 1e-30  # keeps a window of zeros from dividing by zero


@dataclasses.dataclass(frozen=True)
class Cur(kv.Scorer):
    """Scores tokens by approximate leverage, the squared norms of keys and values (CurDKV, 2509.15038; kvpress).

    A squared norm counts as a fraction of the sum over its window. Scores of a head sum to 1, and are 0 for zeros.

    Args:
      window: tokens of a window; windows are counted from the sequence's first token.
      leverage: "product" of both fractions, their "mean", or that of the "key" or "value" alone.
    """

    window: kv.PositiveInt = 16
    leverage: Literal["product", "mean", "key", "value"] = "product"

    __post_init__ = kv.check_fields

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        real = block.clean()
        squares = jnp.stack([jnp.square(x.astype(jnp.float32)).sum(-1) for x in (real.k, real.v)])
        S = squares.shape[3]
        windows = jnp.pad(squares, [(0, 0)] * 3 + [(0, -S % self.window)])
        windows = windows.reshape(*squares.shape[:3], -1, self.window)
        fractions = windows / jnp.maximum(windows.sum(-1, keepdims=True), MIN_SUM)
        key, value = fractions.reshape(*squares.shape[:3], -1)[..., :S]
        score = {"product": key * value, "mean": (key + value) / 2, "key": key, "value": value}[self.leverage]
        return kv.token_scores(score / jnp.maximum(score.sum(2, keepdims=True), MIN_SUM), block)


@kv.register_method(example="cur:budget=512", family="eviction after the prompt")
def cur(
    budget: kv.TokenBudget = 1024,
    window: int = 16,
    leverage: Literal["product", "mean", "key", "value"] = "product",
    sinks: int = 4,
    unit: str = "token",
    per: kv.Scope = "head",
) -> kv.Method:
    """Keeps the prompt tokens whose keys and values are large among their neighbors; it needs no queries.

    The paper's AdaCurDKV divides a layer's budget among its heads: 'cur + adakv'.

    Formula:
      score_s = |k_s|^2 / (sum of |k|^2 in its window) * |v_s|^2 / (sum of |v|^2 in its window)

    Differs:
      AdaCurDKV, the paper's variant that ranks the tokens of all heads of a layer, is 'cur + adakv' (unverified: its
      guaranteed fraction); alone every head keeps the same number, as in CurDKV and `CURPress`. `docs/divisions.md` has
      what each division keeps. The random projection of keys and values before their norms are taken, an option of
      kvpress that is off there, is left out. With leverage=mean and no windows kvpress adds norms that are not
      fractions; here fractions are always added.

    Args:
      budget, sinks, unit, per: as in `make_selection`.
      window: neighbors that a norm is compared with; a window as long as the prompt compares with all (kvpress: 16).
      leverage: "product", "mean", "key" or "value".

    Reference:
      CURPress of kvpress, after CurDKV, Sengupta et al. 2025, arXiv 2509.15038
    """
    return kv.Method(select=kv.make_selection(Cur(window, leverage), budget, sinks, 0, unit, per))
