"""LU-KV: divides a budget among the heads of all layers by curves that are calibrated once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax import method_api as kv
from kvjax.cache.eviction.selection import Candidates
from kvjax.methods.head_shares import CalibratedHeadBudgets, ModelAllocation

PERCENTS = np.arange(1, 100)
"""Tokens of a text that all heads keep in the mean, in percent: the points of a curve."""


@kv.register_table_kind("lukv")
@dataclasses.dataclass(frozen=True)
class BudgetCurves(kv.TableKind):
    """The fraction of a text's tokens that each head keeps, `keep` f32[K 99], where all heads keep 1%, 2%, .. 99%.

    The authors order the tokens of a head by a method's scores, and give heads tokens one by one, by what the next
    token of each adds of later attention. Calibrated, the method's scores say what a token adds as well: the tokens of
    all heads of all layers are ranked by them.

    Args:
      method: the method whose scores rank the tokens; it selects, and its scores are comparable between layers.
        "turned_queries" reads a text once, "kvzip" twice.
    """

    method: str = "turned_queries"

    @property
    def measuring_method(self) -> str:
        return self.method

    def count_layers(
        self, selection: kv.PromptSelection, layer_budgets: kv.LayerBudgets, measures: Candidates, lengths: kv.Array
    ) -> Any:
        L, B, K, U = measures.scores.shape
        size, always = selection.select.granularity.size, measures.always[0][:, None]
        num_kept = lengths[:, None] * jnp.asarray(PERCENTS, jnp.int32)[None] // 100  # i32[B 99], of a head in the mean
        num_units = L * K * jnp.maximum(num_kept - always, 0) // size
        scores = jnp.moveaxis(measures.scores, 1, 0).reshape(B, -1)
        rank = kv.rank(scores).reshape(B, L, K, U)
        own_units = (rank[..., None] < num_units[:, None, None, None]).sum(3, dtype=jnp.int32)  # [B L K 99]
        tokens = (always[:, :, None, None] + own_units * size).astype(jnp.float32)
        shares = jnp.moveaxis(tokens / lengths.astype(jnp.float32)[:, None, None, None], 1, 0)
        return {"shares": shares, "texts": jnp.ones((L, B, 1, 1))}

    def arrays(self, counted: dict[str, np.ndarray], spec: kv.LayerSpec) -> Mapping[str, np.ndarray]:
        return {"keep": (counted["shares"] / counted["texts"]).astype(np.float32)}

    @staticmethod
    def read_published(file: kv.PublishedFile, spec: kv.LayerSpec) -> Sequence[Mapping[str, np.ndarray]]:
        # Entry i has the fractions that leave where (i + 1)% of all tokens leave.
        pruned = file.take("", len(PERCENTS), spec.num_layers, spec.num_kv_heads)
        return [{"keep": 1 - pruned[::-1, i].T} for i in range(spec.num_layers)]

    def example(self, spec: kv.LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        lean, fraction = rng.uniform(-1, 1, spec.num_kv_heads), PERCENTS / 100
        keep = fraction + 0.5 * (lean - lean.mean())[:, None] * fraction * (1 - fraction)
        return {"keep": keep.astype(np.float32)}


@dataclasses.dataclass(frozen=True)
class CurveAllocation(ModelAllocation):
    """A `ModelAllocation` by `BudgetCurves`, whose numbers are rounded within each layer, as kvpress does."""

    @staticmethod
    def load_table(table: kv.TableFile, spec: kv.LayerSpec) -> tuple[np.ndarray, np.ndarray]:
        return _load_curves(table, spec)

    def round_units(self, ideal: np.ndarray, mean: np.ndarray, most: np.ndarray) -> np.ndarray:
        ideal = np.clip(ideal, 0, most[:, None, None])
        whole, total = np.floor(ideal).astype(np.int64), np.round(ideal.sum(2)).astype(np.int64)
        # Remainders that differ by rounding errors alone must tie, so that every machine rounds the same heads up.
        order = np.argsort(np.round(whole - ideal, 6), 2, kind="stable")
        rank = np.argsort(order, 2, kind="stable")
        return whole + (rank < (total - whole.sum(2))[..., None])


@functools.lru_cache(maxsize=16)
def _load_curves(table: kv.TableFile, spec: kv.LayerSpec) -> tuple[np.ndarray, np.ndarray]:
    """Loads the curves' fractions f64[99] and shares f64[L K 99]; raises KvjaxError for those of another model."""
    layers = (dataclasses.replace(spec, index=i) for i in range(spec.num_layers))
    shape = spec.num_kv_heads, len(PERCENTS)
    keep = np.stack([table.layer_arrays(layer, keep=shape)["keep"] for layer in layers]).astype(np.float64)
    if keep.min() < 0 or keep.max() > 1:
        raise kv.KvjaxError(
            f"curves of {table.path} are fractions of a text's tokens and lie in [0, 1], got {keep.min():g} to "
            f"{keep.max():g}; make the table anew, as with `kvjax calibrate lukv`"
        )
    return PERCENTS / 100, keep


@dataclasses.dataclass(frozen=True)
class CurveBudgets(CalibratedHeadBudgets):
    """The rule of a table of `BudgetCurves`."""

    allocation = CurveAllocation


@kv.register_method(
    example="expected_attention:budget=512,epsilon=0.02,recent=1 + lukv", family="component over a selection"
)
def lukv(table: str = "shipped", page: int = 16) -> kv.Method:
    """Divides a budget among all heads of all layers by curves of what tokens add, head by head.

    Its authors use it as in 'expected_attention:budget=25%,epsilon=0.02,recent=1 + lukv'. The selection says which
    tokens stay; sinks and recent ones stay in every head.

    Formula:
      head h of layer l keeps c_lh(b / T) T of a prompt's T tokens, b the budget and c its curve, rounded down, and the
      heads of a layer with the largest remainders one more, up to the rounded sum of the layer

    Differs:
      The budget may lie between two percents, and curves are then interpolated; kvpress takes the nearest percent.
      A head that a curve gives fewer tokens than the sinks and recent ones keeps these. Calibrated curves rank tokens
      by one method's scores, where the authors weigh the scores' order by the attention of answers to questions.

    Args:
      table: a file of kind `lukv`, or a NumPy file of curves that the authors published, as kvpress downloads them;
        "shipped" for the shipped model's, made as `kvjax calibrate lukv` does.
      page: slots of a page, in which heads of unequal length are stored.

    Reference:
      LU-KV, Tang et al. 2026, arXiv 2602.08585; its public code, baidu-baige/LU-KV, and kvpress
    """
    return kv.Method(side_store=kv.PagedHeads(CurveBudgets(BudgetCurves.table_file(table)), page))
