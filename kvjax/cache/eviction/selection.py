"""The component `select`: scores a prompt's tokens and keeps the best of them within a budget."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.cache.components import (
    Budget,
    EvictableUnits,
    Granularity,
    HeadBudgets,
    Representatives,
    Scorer,
    Scores,
    SecondStageScorer,
    SelectedSlots,
    Token,
)
from kvjax.cache.eviction.budgets import TokenBudget, Uniform, num_kept_by_length, parse_budget
from kvjax.cache.eviction.granularity import (
    PromptSplit,
    evictable_mask,
    group_into_units,
    parse_granularity,
    score_units,
    split_prompt,
    units_to_slots,
)
from kvjax.cache.eviction.ranking import Candidates
from kvjax.cache.eviction.representatives import fraction_of
from kvjax.cache.eviction.rescoring import TwoStage
from kvjax.cache.eviction.scorers import InvalidScores
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads
from kvjax.core.top_k import top_k_mask
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError


@dataclasses.dataclass(frozen=True)
class Selection:
    """Keeps each sequence's budget of prompt tokens and evicts the others, once, when the prompt ends.

    Args:
      scorer: how important each token is.
      budget: how many tokens each layer keeps, sinks and recent tokens included.
      sinks: first tokens that always stay.
      recent: last tokens that always stay.
      granularity: whether single tokens, chunks or pages are kept; its module says how many tokens that makes.
      scope: "head", where each key/value head keeps its own tokens, or "layer", one set for all heads.
    """

    scorer: Scorer
    budget: Budget
    sinks: int = 0
    recent: int = 0
    granularity: Granularity = Token()
    scope: str = "head"

    def __post_init__(self):
        if isinstance(self.scorer, type):
            raise KvjaxError(
                f"the scorer is the class {self.scorer.__name__}; give a value of it, as {self.scorer.__name__}()"
            )

    def num_kept(self, length: int) -> int:
        """Most tokens that a prompt of `length` tokens leaves."""
        return int(self._num_kept_by_length(length)[length])

    def max_kept_up_to(self, max_length: int) -> int:
        """Most tokens that any prompt of up to `max_length` tokens leaves."""
        return int(self._num_kept_by_length(max_length).max())

    def max_kept(self) -> int | None:
        """Most tokens that a prompt of any length leaves; None if there is no bound."""
        tokens = self.budget.max_kept()
        return None if tokens is None else max(tokens, self.sinks + self.recent)

    def num_kept_per_sequence(self, block: KVBlock, observation: Observation | None, num_slots: int) -> Array:
        """i32[B]: tokens that each sequence keeps of its prompt, at most `num_slots`."""
        # Where layers divide one budget (CAKE), the observation brings this layer's part of it. Counts of single heads,
        # i32[B K], are no such part: the pages of these heads go by them.
        if observation is not None and observation.num_kept is not None and observation.num_kept.ndim == 1:
            return jnp.minimum(observation.num_kept, num_slots)
        # Lengths are traced, and a budget is a Python function of the length: it is tabulated over all of them.
        table = jnp.asarray(self._num_kept_by_length(block.pos.shape[2]))
        return jnp.minimum(table[(block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)], num_slots)

    def candidates(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Candidates:
        """Scores this layer's units for a ranking over all layers, see `ModelRanking`."""
        num_slots = self.max_kept_up_to(block.pos.shape[2])
        num_kept = self.num_kept_per_sequence(block, None, num_slots)
        split = split_prompt(block.pos, num_kept, num_slots, self.sinks, self.recent, self.granularity)
        # Heads compete with one another here, so scores stay apart whatever the scope.
        token_scores = self._score(block, observation, spec)
        scores = score_units(token_scores.per_kv_head, self.sinks, self.granularity)
        scores = jnp.where(evictable_mask(split, scores.shape[2])[:, None], scores, -jnp.inf)
        return Candidates(scores, split.num_kept_units, split.num_always, token_scores)

    def select_slots(
        self,
        block: KVBlock,
        observation: Observation | None,
        num_kept: Array,
        num_slots: int,
        spec: LayerSpec,
        *,
        representatives: Representatives | None = None,
        head_budgets: HeadBudgets | None = None,
        second_stage: SecondStageScorer | None = None,
        scores: Scores | None = None,
    ) -> SelectedSlots:
        """Selects the most important tokens of each sequence; ties go to the earlier token.

        Args:
          block: prompt keys and values [B K T H], sequences left-aligned.
          observation: what the scorer asks to see; None for a scorer of keys and values alone.
          num_kept: i32[B], tokens that each sequence keeps, see `num_kept_per_sequence`.
          num_slots: static size of the result, at least `num_kept.max()`.
          spec: the layer.
          representatives: gives a part of the budget to units that stand for evicted ones. They are one set for the
            whole layer, chosen among the units that no head keeps for its score (KVCrush's signatures mix the heads).
            Where it finds fewer, each head's next best units take the places, so that the count stays the same.
          head_budgets: divides the budget among the heads; `num_kept` and `num_slots` are then means over all heads.
          second_stage: keeps only a part of each head's tokens by `scorer`, and the others by new scores.
          scores: what `scorer` said of this prompt before, for a ranking over all layers; None: it is asked now.
        """
        num_tokens, size = block.k.shape[2], self.granularity.size
        split = split_prompt(block.pos, num_kept, num_slots, self.sinks, self.recent, self.granularity)
        scores = self._score(block, observation, spec) if scores is None else scores
        unit_scores = self._score_units(scores.per_kv_head)
        if head_budgets is not None:
            head_budgets = head_budgets.for_lengths(split.length, num_tokens)
        two_stage = None
        if second_stage is not None:
            new_scores = second_stage.scores(block, scores.per_kv_head, observation, spec)
            two_stage = TwoStage(second_stage.share, self._score_units(new_scores))

        def select_units(allowed: Array, num_reserved: Array) -> Array:
            """bool[B K U]: each head's best units of allowed bool[B U], in the places that i32[B] others leave."""
            num_units, num_always = split.num_kept_units - num_reserved, split.num_always // size + num_reserved
            ranked = unit_scores
            if head_budgets is not None:
                num_units = head_budgets.allocate_local(unit_scores, allowed, num_units, num_always)
                num_always = num_always[:, None]
            if two_stage is not None:
                ranked = two_stage.rank(unit_scores, allowed[:, None], num_units, num_always)
            return top_k_mask(ranked, allowed[:, None], num_units)

        evictable = evictable_mask(split, unit_scores.shape[2])
        represented = jnp.zeros_like(evictable)
        spare_slots = max(num_slots - self.sinks - self.recent, 0)
        if representatives is not None:
            max_representatives = fraction_of(representatives.share, spare_slots // size)
            if max_representatives:
                represented = self._select_representatives(
                    block, scores.per_query_head, split, representatives, max_representatives, select_units
                )
        kept = select_units(evictable & ~represented, represented.sum(-1, dtype=jnp.int32)) | represented[:, None]
        if head_budgets is not None:  # one head may take the places of all the others
            num_slots = min(num_tokens, num_slots + head_budgets.num_other_heads(spec) * spare_slots)
        return SelectedSlots(units_to_slots(kept, split, num_tokens, num_slots, self.sinks, size), scores)

    def _score(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        """Runs the scorer, and turns its author's likely mistakes into errors that name them."""
        name = type(self.scorer).__name__
        try:
            scores = self.scorer.scores(block, observation, spec)
        except AttributeError as e:
            if observation is None and isinstance(e.obj, types.NoneType):
                raise KvjaxError(
                    f"{name}.scores reads `observation.{e.name}`, and {name} asks for no observation; say "
                    "`num_queries = 32` in its class for the last 32 queries, or None for all of them"
                ) from e
            raise
        expected = block.k.shape[:3]
        if not isinstance(scores, Scores) or scores.per_kv_head.shape != expected:
            if isinstance(scores, Scores):
                returned = f"scores of shape {scores.per_kv_head.shape}"
            else:
                returned = "an array" if isinstance(scores, jax.Array | np.ndarray) else type(scores).__name__
            raise KvjaxError(
                f"{name}.scores must return token_scores(x, block) of an x f32[B K S], here {expected}, and returned "
                f"{returned}"
            )
        if not isinstance(scores.per_kv_head, Tracer):  # values are known under `jax.disable_jit` alone
            is_nan, is_real = np.isnan(np.asarray(scores.per_kv_head, np.float32)), np.asarray(block.pos) >= 0
            if (is_nan & is_real).any():
                raise InvalidScores(f"{name}.scores gives NaN, which would win over every number")
        return scores

    def _score_units(self, scores: Array) -> Array:
        """f32[B K S] -> f32[B K U], or f32[B 1 U] where the scope is the layer."""
        if self.scope not in ("head", "layer"):
            raise KvjaxError(f"the scope, `per` in a method's string, must be 'head' or 'layer', got {self.scope!r}")
        if self.scope == "layer":
            scores = over_heads.mean(scores)
        return score_units(scores, self.sinks, self.granularity)

    def _select_representatives(
        self,
        block: KVBlock,
        scores_per_query_head: Array,
        split: PromptSplit,
        representatives: Representatives,
        max_representatives: int,
        select_units: Callable[[Array, Array], Array],
    ) -> Array:
        """bool[B U]: the units of each sequence that stay to stand for others."""
        scores = group_into_units(scores_per_query_head, self.sinks, self.granularity.size)
        keys = group_into_units(block.k, self.sinks, self.granularity.size, axis=2)
        B, U = scores.shape[0], scores.shape[3]
        evictable = evictable_mask(split, U)
        num_representatives = fraction_of(representatives.share, split.num_kept_units)
        important = over_heads.any(select_units(evictable, num_representatives))[:, 0]
        units = EvictableUnits(scores, keys, evictable, evictable & ~important)
        chosen = representatives.choose(units, num_representatives, max_representatives)
        index = jnp.where(chosen < 0, U, chosen)
        return jnp.zeros((B, U), bool).at[jnp.arange(B)[:, None], index].set(True, mode="drop")

    def _num_kept_by_length(self, max_length: int) -> np.ndarray:
        return num_kept_by_length(self.budget, max_length, self.sinks + self.recent)


def make_selection(
    scorer: Scorer, budget: TokenBudget, sinks: int = 0, recent: int = 0, unit: str = "token", per: str = "head"
) -> Selection:
    """Makes a selection from the parameters of a method's string.

    Args:
      scorer: how important each token is.
      budget: prompt tokens kept per layer and key/value head, sinks and recent tokens included; a fraction of each
        prompt as "25%"; or any `Budget`.
      sinks: first tokens that always stay.
      recent: last tokens that always stay.
      unit: the granularity, what is kept or evicted as a whole: "token", or "chunk8", "page32" and the like.
      per: the scope: "head", or "layer" for one set of tokens for all heads.
    """
    tokens = parse_budget(budget)
    budget = Uniform(tokens) if isinstance(tokens, int) else tokens
    return Selection(scorer, budget, sinks, recent, parse_granularity(unit), per)
