"""Which tokens of a prompt a layer keeps: scored, counted, protected, and chosen unit by unit."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.cache.eviction.budget_allocation import HeadBudgets
from kvjax.cache.eviction.budgets import Budget, Tokens, Uniform, kept_by_length
from kvjax.cache.eviction.granularity import (
    Chunk,
    Page,
    Split,
    Token,
    Unit,
    by_unit,
    check,
    evictable,
    indices,
    per_head,
    split,
    top,
    unit_scores,
)
from kvjax.cache.eviction.ranking import Candidates
from kvjax.cache.eviction.representatives import Representatives, Units, fraction_of
from kvjax.cache.eviction.rescoring import SecondStageScorer, TwoStage
from kvjax.cache.eviction.scorers import Scorer, Scores
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError


class SelectedSlots(NamedTuple):
    """What a selection says of a block."""

    slots: Array  # i32[B 1|K n], the slots that stay, in order, -1 in unused places behind them
    scores: Scores


@dataclasses.dataclass(frozen=True)
class Selection:
    """The `select` slot of a method: after the prompt, each row keeps its budget of tokens and loses the others.

    sinks, recent: so many first and last tokens always stay. unit: what is kept or dropped as one. per: "head", each
    key/value head its own tokens, or "layer", one set for all. How many tokens that makes is told in `units`.
    """

    scorer: Scorer
    budget: Budget
    sinks: int = 0
    recent: int = 0
    unit: Unit = Token()
    per: str = "head"

    def __post_init__(self):
        if isinstance(self.scorer, type):
            raise KvjaxError(
                f"the scorer is the class {self.scorer.__name__}; give a value of it, as {self.scorer.__name__}()"
            )

    def num_kept(self, length: int) -> int:
        """Most tokens that a prompt of this length leaves."""
        return int(self._table(length)[length])

    def most_of(self, longest: int) -> int:
        """Most tokens that any prompt of up to so many tokens leaves."""
        return int(self._table(longest).max())

    def most(self) -> int | None:
        """Most tokens that a text without end leaves; None if there is no bound."""
        most = self.budget.most()
        return None if most is None else max(most, self.sinks + self.recent)

    def counts(self, block: KVBlock, observation: Observation | None, slots: int) -> Array:
        """i32[B]: tokens of each row that stay, at most `slots`."""
        if observation is not None and observation.num_kept is not None and observation.num_kept.ndim == 1:
            return jnp.minimum(observation.num_kept, slots)
        table = jnp.asarray(self._table(block.pos.shape[2]))
        return jnp.minimum(table[(block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)], slots)

    def candidates(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Candidates:
        """One layer's part in a ranking over the model."""
        slots = self.most_of(block.pos.shape[2])
        part = split(block.pos, self.counts(block, None, slots), slots, self.sinks, self.recent, self.unit.size)
        scores = self._scored(block, observation, spec)
        self._check_scores(scores, block)
        by_units = unit_scores(scores.per_kv_head, self.sinks, self.unit)
        by_units = jnp.where(evictable(part, by_units.shape[2])[:, None], by_units, -jnp.inf)
        return Candidates(by_units, part.quota, part.front + part.back)

    def choose(
        self,
        block: KVBlock,
        observation: Observation | None,
        keep: Array,
        slots: int,
        spec: LayerSpec,
        representatives: Representatives | None = None,
        share: HeadBudgets | None = None,
        second_stage: SecondStageScorer | None = None,
    ) -> SelectedSlots:
        """The `keep` i32[B] tokens of each row that matter most; block [B K T H], rows left-aligned.

        With `representatives`, a share of the units that the budget has room for, rounded down, goes to
        representatives: one set for the whole layer (KVCrush's bits mix the heads), chosen from the units that no
        key/value head keeps as important. Where it finds fewer, each head's next best units take the places: a row
        keeps as many tokens as without it. With `share`, `keep` and `slots` are means over all heads, and a head may
        take places of others. With `second_stage`, a head keeps only a part of its tokens by the scorer, and the others
        by new scores.
        """
        S = block.k.shape[2]
        check(block.pos, keep, slots, self.sinks, self.recent, self.unit)
        scores = self._scored(block, observation, spec)
        self._check_scores(scores, block)
        part = split(block.pos, keep, slots, self.sinks, self.recent, self.unit.size)
        by_units = unit_scores(per_head(scores.per_kv_head, self.per), self.sinks, self.unit)
        if share is not None:
            share = share.of_rows(part.length, S)
        then = None
        if second_stage is not None:
            new = second_stage.scores(block, scores.per_kv_head, observation, spec)
            then = TwoStage(second_stage.share, unit_scores(per_head(new, self.per), self.sinks, self.unit))
        best = functools.partial(self._best, by_units, part, share, then)
        taken = jnp.zeros((by_units.shape[0], by_units.shape[2]), bool)
        places = 0
        if representatives is not None:
            places = fraction_of(representatives.share, max(slots - self.sinks - self.recent, 0) // self.unit.size)
        if representatives is not None and places:
            taken = self._representatives(block, scores.per_query_head, part, representatives, places, best)
        allowed = evictable(part, by_units.shape[2]) & ~taken
        chosen = best(allowed, taken.sum(-1, dtype=jnp.int32)) | taken[:, None]
        if share is not None:
            slots = min(S, slots + share.others(spec) * max(slots - self.sinks - self.recent, 0))
        return SelectedSlots(indices(chosen, part, S, slots, self.sinks, self.unit.size), scores)

    def _scored(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        """What the scorer says; raises KvjaxError where it looks at queries that it has not asked for."""
        try:
            return self.scorer.scores(block, observation, spec)
        except AttributeError as e:
            if observation is None and isinstance(e.obj, types.NoneType):
                name = type(self.scorer).__name__
                raise KvjaxError(
                    f"{name}.scores reads `observation.{e.name}`, and {name} asks for nothing to be seen; say "
                    "`num_queries = 32` in its class (so many last queries), or None (all of them)"
                ) from e
            raise

    def _check_scores(self, scores: Any, block: KVBlock) -> None:
        """Raises KvjaxError unless each key/value head scores each token of each row.

        Under `jax.disable_jit`, where the scores' values are known, also for a real token whose score is NaN.
        """
        found, want = getattr(getattr(scores, "per_kv_head", None), "shape", None), block.k.shape[:3]
        if found != want:
            bare = "an array" if hasattr(scores, "shape") else type(scores).__name__
            said = bare if found is None else f"scores of shape {found}"
            raise KvjaxError(
                f"{type(self.scorer).__name__}.scores must return token_scores(x, block) of an x f32[B K S], here "
                f"{want}, and returned {said}"
            )
        if not isinstance(scores.per_kv_head, Tracer):
            nan, real = np.isnan(np.asarray(scores.per_kv_head, np.float32)), np.asarray(block.pos) >= 0
            if (nan & real).any():
                raise KvjaxError(f"{type(self.scorer).__name__}.scores gives NaN, which would win over every number")

    def _best(
        self,
        by_units: Array,
        part: Split,
        share: HeadBudgets | None,
        then: TwoStage | None,
        allowed: Array,
        taken: Array,
    ) -> Array:
        """bool[B K U]: each head's best of the allowed units bool[B U], in the places beside `taken` i32[B] others."""
        count, beside = part.quota - taken, (part.front + part.back) // self.unit.size + taken
        if share is not None:
            count, beside = share.allocate_local(by_units, allowed, count, beside), beside[:, None]
        if then is not None:
            by_units = then.scores(by_units, allowed[:, None], count, beside)
        return top(by_units, allowed[:, None], count)

    def _representatives(
        self,
        block: KVBlock,
        heads: Array,
        part: Split,
        representatives: Representatives,
        places: int,
        best: Callable[[Array, Array], Array],
    ) -> Array:
        """bool[B U]: the units of each row that stand for others; `best` is `_best` of allowed and taken units."""
        scores = by_unit(heads, self.sinks, self.unit.size)
        B, U = scores.shape[0], scores.shape[3]
        valid = evictable(part, U)
        count = fraction_of(representatives.share, part.quota)
        important = over_heads.any(best(valid, count))[:, 0]
        units = Units(
            scores,
            by_unit(block.k, self.sinks, self.unit.size, 2),
            valid,
            valid & ~important,
        )
        found = representatives.choose(units, count, places)
        at = jnp.where(found < 0, U, found)
        return jnp.zeros((B, U), bool).at[jnp.arange(B)[:, None], at].set(True, mode="drop")

    def _table(self, longest: int) -> np.ndarray:
        return kept_by_length(self.budget, longest, self.sinks + self.recent)


def unit_of(text: str) -> Unit:
    """A unit from "token", "chunk8" or "page32" and the like; raises KvjaxError for anything else."""
    kind = text.rstrip("0123456789")
    size = text[len(kind) :]
    if text == "token":
        return Token()
    if kind in ("chunk", "page") and size:
        return (Chunk if kind == "chunk" else Page)(int(size))
    raise KvjaxError(f"unit must be 'token', 'chunk' or 'page' with a size, as in 'chunk8' or 'page32', got {text!r}")


def make_selection(
    scorer: Scorer, budget: int | str | Budget, sinks: int = 0, recent: int = 0, unit: str = "token", per: str = "head"
) -> Selection:
    """Makes a selection from the parameters of a method's string; `budget` may also be any `Budget`.

    Args:
      scorer: how important each token is.
      budget: prompt tokens kept per layer and key/value head, or a fraction of each prompt as 25%.
      sinks: first tokens that always stay.
      recent: last tokens that always stay.
      unit: the granularity, "token", or "chunk8", "page32" and the like: tokens kept or evicted as a whole.
      per: the scope, "head", or "layer" for one set of tokens for all heads.
    """
    tokens = Tokens(budget)
    budget = Uniform(tokens) if isinstance(tokens, int) else tokens
    return Selection(scorer, budget, sinks, recent, unit_of(unit), per)
