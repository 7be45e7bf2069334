"""Head shares: divides a budget among all heads of all layers by a table that is calibrated once.

`CalibratedShares` makes the table. `CalibratedHeadBudgets` is the rule that a method holds; bound to a selection, it
becomes a `ModelAllocation`, the tokens of every head for each length of a prompt, and each layer reads its own part of
it: `LayerMean`, the budget of the layer's selection, and `LayerHeadBudgets`, the tokens of its heads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from kvjax import method_api as kv
from kvjax.cache.eviction.budgets import budgets_by_layer
from kvjax.cache.eviction.selection import Candidates, MeasuredHeadTokens

CALIBRATED_FRACTIONS = tuple(map(Fraction, ("1/32", "1/16", "1/8", "1/4", "1/2", "3/4")))
"""Budgets, as fractions of a text, at which a table is calibrated."""

LENGTHS_AT_ONCE = 1024  # prompt lengths whose allocations are computed together
MEAN_TOLERANCE = 1e-3  # between the mean of a table's shares and its fraction: they are stored in float32


@kv.register_table_kind("head_shares")
@dataclasses.dataclass(frozen=True)
class CalibratedShares(kv.TableKind):
    """The fraction of a text's tokens that each head keeps when the tokens of all heads of all layers are ranked.

    Arrays of a layer: `fractions` f32[R], budgets as fractions of a text, ascending, equal in all layers; `shares`
    f32[K R], tokens that a head keeps over tokens of the texts. The mean of the shares over all heads of the model is
    the fraction. Heads saturate at different budgets, so the shares at one fraction do not determine the others.

    Args:
      method: the method whose scores rank the tokens; it selects, and its scores are comparable between layers.
        "kvzip" reads a text twice, and its shares divide better on Gemma 3 270M and Qwen2.5-Coder-0.5B, and no worse on
        SmolLM2-135M; "turned_queries" reads it once.
    """

    method: str = "kvzip"

    @property
    def measuring_method(self) -> str:
        return self.method

    def count_layers(
        self, selection: kv.PromptSelection, layer_budgets: kv.LayerBudgets, measures: Candidates, lengths: kv.Array
    ) -> Any:
        """Counts the tokens i32[L B K R] that each head and all heads of the model keep, and those of the texts."""
        size, shape = selection.select.granularity.size, measures.scores.shape[:3]
        kept = []
        for fraction in CALIBRATED_FRACTIONS:
            # Scores do not depend on the budget, so one reading of the texts serves all fractions.
            budget = (lengths * fraction.numerator // fraction.denominator)[None]
            num_units = jnp.maximum(budget - measures.always, 0) // size
            kept.append(layer_budgets.allocate_tokens(selection, measures._replace(quota=num_units), lengths))
        tokens = jnp.stack(kept, -1)
        every = jnp.broadcast_to(tokens.sum((0, 2), keepdims=True, dtype=jnp.int32), tokens.shape)
        return {"kept": tokens, "every": every, "length": jnp.broadcast_to(lengths[None, :, None], shape)}

    def arrays(self, counted: dict[str, np.ndarray], spec: kv.LayerSpec) -> Mapping[str, np.ndarray]:
        length = counted["length"]
        fractions = counted["every"][0] / (length[0] * spec.num_layers * spec.num_kv_heads)
        if not (np.diff(fractions, prepend=0) > 0).all():
            raise kv.KvjaxError(
                f"the texts do not leave room for what always stays at a budget of {CALIBRATED_FRACTIONS[0]} of their "
                f"tokens: heads keep {fractions[0]:.3f} and {fractions[1]:.3f} of them at the lowest two budgets; give "
                "longer texts, or a method with fewer sinks and recent tokens"
            )
        return {
            "shares": (counted["kept"] / length[:, None]).astype(np.float32),
            "fractions": fractions.astype(np.float32),
        }

    def example(self, spec: kv.LayerSpec, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        fractions = np.array(CALIBRATED_FRACTIONS, np.float64)
        lean = rng.uniform(-1, 1, spec.num_kv_heads)
        lean = (lean - lean.mean()) / max(np.abs(lean - lean.mean()).max(), 1e-9)
        shares = fractions + 0.5 * lean[:, None] * fractions * (1 - fractions)
        return {"shares": shares.astype(np.float32), "fractions": fractions.astype(np.float32)}


@dataclasses.dataclass(frozen=True)
class ModelAllocation:
    """The tokens that a table gives to the heads of a model, by the prompt's length alone.

    Args:
      table: a file of `CalibratedShares`.
      spec: of any of the model's layers, without its index.
      budget: the selection's budget, the mean number of tokens over the heads of `spec.method_layers`.
      sinks: first tokens that every head keeps.
      recent: last tokens that every head keeps.
      size: tokens of a unit.
      represented: fraction of a layer's units that representatives take.
    """

    table: kv.TableFile
    spec: kv.LayerSpec
    budget: kv.Budget
    sinks: int
    recent: int
    size: int
    represented: float

    def tokens(self, longest: int) -> np.ndarray:
        """Returns the tokens that each head keeps of prompts of 0..longest tokens, i32[longest + 1, L, K]."""
        # The selection's own check: a budget in tokens must have room for sinks and recent tokens.
        kv.Selection(kv.Scorer(), self.budget, self.sinks, self.recent).num_kept_by_length(longest)
        # Lengths are tabulated up to a power of two, so that similar prompts share a table.
        return _cached_tokens(self, 1 << max((longest - 1).bit_length(), 8))[: longest + 1]

    def quota(self, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns, for prompts of 0..longest tokens: tokens that always stay, units, and units kept in the mean.

        It equals `granularity.split` for all lengths at once.
        """
        length = np.arange(longest + 1)
        budget = self.budget.num_kept_by_length(longest)
        num_kept = np.maximum(budget, np.minimum(length, self.sinks + self.recent)).astype(np.int64)
        sinks = np.minimum(self.sinks, num_kept)
        recent = np.minimum(self.recent, num_kept - sinks)
        budget_left, between = num_kept - sinks - recent, length - sinks - recent
        always = sinks + recent + np.minimum(between % self.size, budget_left)
        return always, between // self.size, (num_kept - always) // self.size

    @staticmethod
    def load_table(table: kv.TableFile, spec: kv.LayerSpec) -> tuple[np.ndarray, np.ndarray]:
        """Loads fractions f64[R], ascending, and shares f64[L K R]; raises KvjaxError for a table that does not fit."""
        return _load_table(table, spec)

    def own_shares(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the table of the layers that divide the budget: fractions f64[R], ascending, and shares f64[L K R].

        The heads of other layers, as those with windows, were ranked with them, and have a part in the table's
        fractions. A ranking of these layers alone gives them the same shares where their own mean is the fraction.
        """
        fractions, shares = self.load_table(self.table, self.spec)
        if len(self.spec.method_layers) == len(shares):
            return fractions, shares
        own = shares[list(self.spec.method_layers)]
        own_fractions = own.mean((0, 1))
        return own_fractions[own_fractions > 0], own[..., own_fractions > 0]

    def round_units(self, ideal: np.ndarray, mean: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Rounds the units of all heads, f64[N L K] -> i64[N L K], up to most i64[N], to a mean of i64[N]."""
        heads = ideal.reshape(len(ideal), -1)
        none = np.zeros((len(ideal), 1))
        return round_to_totals(heads, mean * heads.shape[1], none, most[:, None]).reshape(ideal.shape)


@functools.lru_cache(maxsize=8)
def _cached_tokens(allocation: ModelAllocation, longest: int) -> np.ndarray:
    """Computes `ModelAllocation.tokens` once for a length that all layers and similar prompts share."""
    quota, length = allocation.quota(longest), np.arange(longest + 1)
    # A block of lengths at a time: for a long text, all of them in float64 would take gigabytes.
    blocks = [slice(start, start + LENGTHS_AT_ONCE) for start in range(0, longest + 1, LENGTHS_AT_ONCE)]
    tokens = np.concatenate([_allocate_tokens(allocation, length[b], *(x[b] for x in quota)) for b in blocks])
    tokens.flags.writeable = False
    return tokens


def _allocate_tokens(
    allocation: ModelAllocation, length: np.ndarray, always: np.ndarray, most: np.ndarray, mean: np.ndarray
) -> np.ndarray:
    """Divides the tokens of prompts of length i64[N]: i32[N, L, K]; the other arrays are `quota` of these lengths."""
    fractions, shares = allocation.own_shares()
    L, K, _ = shares.shape
    fraction = (always + mean * allocation.size) / np.maximum(length, 1)
    # Nothing is kept at 0 and everything at 1. Between the table's fractions shares are interpolated linearly, because
    # that keeps their mean at the fraction.
    at = np.array([0.0, *fractions, 1.0])
    share = np.stack([np.interp(fraction, at, [0.0, *share, 1.0]) for share in shares.reshape(L * K, -1)], 1)
    ideal = (share * length[:, None] - always[:, None]) / allocation.size
    units = allocation.round_units(ideal.reshape(-1, L, K), mean, most)
    if allocation.represented:
        # Representatives take equally many units of each head of a layer, so each head must have as many.
        mean_of_layer = -(-units.sum(2) // K)
        least = np.asarray(kv.fraction_of(allocation.represented, mean_of_layer))[..., None]
        total = np.maximum(units.sum(2), K * least[..., 0])
        units, least = (x.reshape(-1, x.shape[-1]) for x in (units, least))
        units = round_to_totals(units, total.reshape(-1), least, np.repeat(most, L)[:, None]).reshape(-1, L, K)
    return (always[:, None, None] + allocation.size * units).astype(np.int32)


def round_to_totals(ideal: np.ndarray, total: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Rounds f64[N n] to whole numbers whose sums are total i64[N], by the largest remainder.

    First all numbers of a row move by one amount, where the bounds allow it. Ties are rounded up from the left.

    Args:
      ideal: f64[N n].
      total: i64[N].
      least: [N 1], lower bound of every number of the row.
      most: [N 1], upper bound.

    Returns:
      i64[N n].
    """
    below, above = (least - ideal).min(1, keepdims=True), (most - ideal).max(1, keepdims=True)
    for _ in range(60):  # bisection; 60 halvings exhaust the precision of float64
        middle = (below + above) / 2
        is_enough = np.clip(ideal + middle, least, most).sum(1, keepdims=True) >= total[:, None]
        below, above = np.where(is_enough, below, middle), np.where(is_enough, middle, above)
    # Remainders that differ by rounding errors alone must tie, so that every machine rounds the same heads up.
    exact = np.round(np.clip(ideal + above, least, most), 6)
    whole = np.floor(exact).astype(np.int64)
    order = np.argsort(np.round(whole - exact, 6), 1, kind="stable")
    one_more = np.arange(ideal.shape[1])[None] < (total - whole.sum(1))[:, None]
    np.put_along_axis(whole, order, np.take_along_axis(whole, order, 1) + one_more, 1)
    return whole


@functools.lru_cache(maxsize=16)
def _load_table(table: kv.TableFile, spec: kv.LayerSpec) -> tuple[np.ndarray, np.ndarray]:
    """Loads (fractions f64[R], shares f64[L K R]); raises KvjaxError for a table of another model."""
    shares, fractions = [], []
    for i in range(spec.num_layers):
        layer = dataclasses.replace(spec, index=i)
        size = table.layer_arrays(layer, fractions=(None,))["fractions"].shape[0]
        arrays = table.layer_arrays(layer, shares=(spec.num_kv_heads, size), fractions=(size,))
        shares.append(arrays["shares"].astype(np.float64))
        fractions.append(arrays["fractions"].astype(np.float64).tolist())
    at, remedy = fractions[0], "make the table anew, as with `kvjax calibrate head_shares`"
    if not at or any(other != at for other in fractions) or sorted({0.0, *at, 1.0}) != [0.0, *at, 1.0]:
        raise kv.KvjaxError(
            f"fractions of {table.path} must ascend between 0 and 1 and be the same in every layer, got {at}; {remedy}"
        )
    every = np.stack(shares)
    if every.min() < 0 or every.max() > 1:
        raise kv.KvjaxError(
            f"shares of {table.path} are tokens kept of a text's and lie in [0, 1], got {every.min():g} to "
            f"{every.max():g}; {remedy}"
        )
    for fraction, mean in zip(at, every.mean((0, 1)).tolist(), strict=True):
        if abs(mean - fraction) > MEAN_TOLERANCE:
            raise kv.KvjaxError(
                f"at the fraction {fraction:g} the shares of {table.path} have the mean {mean:.4f}, and it must be the "
                f"fraction; {remedy}"
            )
    return np.array(at), every


@dataclasses.dataclass(frozen=True)
class LayerHeadBudgets(kv.HeadBudgets):
    """The tokens that the heads of one layer keep.

    Args:
      allocation: of the model.
      place: of the layer among `spec.method_layers`.
    """

    allocation: ModelAllocation
    place: int

    def num_kept_by_length(self, longest: int) -> np.ndarray:
        return self.allocation.tokens(longest)[:, self.place]

    def undivided_budget(self, budget: kv.Budget) -> kv.Budget:
        return self.allocation.budget

    def for_lengths(self, lengths: kv.Array, longest: int) -> kv.HeadBudgets:
        return SequenceBudgets(jnp.asarray(self.num_kept_by_length(longest))[lengths], self.allocation.size)


@dataclasses.dataclass(frozen=True)
class LayerMean(kv.Budget):
    """The budget of a selection under `LayerHeadBudgets`: the mean of the layer's heads, rounded up to whole units."""

    heads: LayerHeadBudgets

    def num_kept(self, length: int) -> int:
        return int(self.num_kept_by_length(length)[length])

    def num_kept_by_length(self, longest: int) -> np.ndarray:
        tokens, size = self.heads.num_kept_by_length(longest), self.heads.allocation.size
        always = self.heads.allocation.quota(longest)[0]
        units = (tokens - always[:, None]).sum(1) // size
        return (always - size * (-units // tokens.shape[1])).astype(np.int32)

    def max_kept(self) -> int | None:
        allocation = self.heads.allocation
        most = allocation.budget.max_kept()
        if most is None:
            return None
        # Below the table's first fraction shares are proportional to it, so no head keeps more of longer prompts.
        first = allocation.own_shares()[0][0]
        return int(self.num_kept_by_length(int(most / first) + 2 * allocation.size).max())


class SequenceBudgets(MeasuredHeadTokens):
    """The tokens that a layer's heads keep of each prompt of a batch."""

    # Each layer's budget is settled before, so a head competes with those of its own layer alone.
    num_other_heads = kv.HeadBudgets.num_other_heads


@dataclasses.dataclass(frozen=True)
class CalibratedHeadBudgets(kv.HeadBudgets):
    """The rule of a table; bound to a layer and its selection, it becomes a `LayerHeadBudgets`."""

    table: kv.TableFile

    allocation: ClassVar[type[ModelAllocation]] = ModelAllocation

    def at(self, spec: kv.LayerSpec) -> CalibratedHeadBudgets:
        self.allocation.load_table(self.table, spec.without_index)
        return self

    def bind_budget(
        self, selection: kv.PromptSelection, budget: kv.Budget, index: int
    ) -> tuple[kv.Budget, kv.HeadBudgets]:
        select, spec = selection.select, selection.spec
        if len(set(budgets_by_layer(budget, spec))) > 1:
            raise kv.IncompatibleMethod(
                "a table of all heads (component `side_store`) divides one budget among all layers, and "
                f"{type(select.budget).__name__} (component `select`) has divided it already; give all layers the "
                "same, as in 'snapkv:budget=256 + head_shares'"
            )
        represented = 0.0 if selection.representatives is None else selection.representatives.share
        allocation = self.allocation(
            self.table,
            spec.without_index,
            select.budget,
            select.sinks,
            select.recent,
            select.granularity.size,
            represented,
        )
        heads = LayerHeadBudgets(allocation, spec.method_layers.index(index))
        return LayerMean(heads), heads


@kv.register_method(example="turned_queries:budget=512,level=head + head_shares", family="component over a selection")
def head_shares(table: str = "shipped", page: int = 16) -> kv.Method:
    """Divides one budget among all heads of all layers by a table that is calibrated once.

    Use it as in 'snapkv:budget=25% + head_shares', or 'kvzip:budget=25%,level=head + head_shares'. The number of tokens
    that a head keeps depends on the prompt's length alone, so shapes and bytes are known before any prompt is read; the
    selection says which tokens. Sinks and recent tokens stay in every head.

    Formula:
      head h of layer l keeps s_lh(b / T) T of a prompt's T tokens, b the budget, s interpolated in a table whose mean
      over all heads is b / T; whole numbers whose sum is b times the heads of all layers

    Differs:
      There is no paper. KVzip ranks the tokens of each prompt, so that a head keeps more of one prompt than of another;
      here that ranking is made once, on other texts, and each head keeps a number that is known beforehand.

    Args:
      table: a file of kind `head_shares`, which `kvjax calibrate head_shares` makes from a few texts; "shipped" for the
        tables of the shipped model, SmolLM2-135M and Qwen2.5-Coder-0.5B.
      page: slots of a page, in which heads of unequal length are stored.

    Reference:
      kvjax's own, after the ranking over the model of KVzip, Kim et al. 2025, arXiv 2505.23416
    """
    return kv.Method(side_store=kv.PagedHeads(CalibratedHeadBudgets(CalibratedShares.table_file(table)), page))
