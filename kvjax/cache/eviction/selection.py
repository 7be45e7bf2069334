"""A layer's selection at work: it scores a prompt's tokens and keeps the best of them within a budget."""

from __future__ import annotations

import dataclasses
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.cache.components import (
    EvictableUnits,
    HeadBudgets,
    PromptSelection,
    Scope,
    Scorer,
    Scores,
    SelectedSlots,
    Selection,
)
from kvjax.cache.eviction.budgets import TokenBudget, Uniform, parse_budget
from kvjax.cache.eviction.granularity import (
    evictable_mask,
    group_into_units,
    parse_granularity,
    score_units,
    split_prompt,
    units_to_slots,
)
from kvjax.cache.eviction.representatives import fraction_of
from kvjax.cache.eviction.rescoring import TwoStage
from kvjax.cache.eviction.scorers import InvalidScores
from kvjax.cache.protocol import LayerSpec
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads, to_numpy
from kvjax.core.top_k import top_k_mask
from kvjax.core.types import Array, KVBlock, gather_tokens
from kvjax.errors import KvjaxError


class Candidates(NamedTuple):
    """The units of one layer that take part in a ranking, and how many the layer would keep by itself."""

    scores: Array  # f32[B K U], -inf for what is no whole unit of the sequence
    quota: Array  # i32[B], units that each head would keep if all heads kept equally many
    always: Array  # i32[B], tokens of each head that stay in any case: sinks, recent ones and an incomplete unit
    token_scores: Scores | None = None  # from which `scores` were made; the layer selects by them


@dataclasses.dataclass(eq=False)
class MeasuredHeadTokens(HeadBudgets):
    """Tokens that the heads of a layer keep, known after a ranking; made only while a layer is traced."""

    tokens: Array  # i32[B K], of all heads
    size: int  # tokens of a unit

    def num_other_heads(self, spec: LayerSpec) -> int:
        """All other heads of the layers that divide a budget: any of them may have left its budget to one."""
        return len(spec.method_layers) * spec.num_kv_heads - 1

    def allocate_local(self, scores: Array, allowed: Array, num_units: Array, num_always: Array) -> Array:
        local_heads = scores.shape[1]
        index = over_heads.first_head(local_heads) + jnp.arange(local_heads, dtype=jnp.int32)
        return jnp.take(self.tokens, index, axis=1) // self.size - num_always[:, None]


def apply_selection(
    selection: PromptSelection,
    block: KVBlock,
    observation: Observation | None,
    num_slots: int,
    head_budgets: HeadBudgets | None = None,
) -> KVBlock:
    """Applies a layer's selection to a prompt, with representatives and merging.

    Args:
      selection: of the layer.
      block: the prompt [B K T H].
      observation: of the prompt's queries, with this layer's part of a budget that layers divide.
      num_slots: static size of the result.
      head_budgets: divides the layer's budget among its heads; a head may then keep more than the mean.

    Returns:
      The tokens that stay [B K num_slots H], in the order of their positions.
    """
    select, scores = selection.select, None
    divided = None if observation is None else observation.num_kept  # this layer's part, where layers divide a budget
    if divided is not None and divided.ndim == 1:
        num_kept = jnp.minimum(divided, num_slots)
    else:
        num_kept = count_kept(select, block, num_slots)
    if observation is not None and divided is not None and divided.ndim == 2:  # of each head
        head_budgets = MeasuredHeadTokens(divided, select.granularity.size)
        if isinstance(observation.measure, Candidates):
            # The ranking has scored the tokens, which can take as long as the prompt itself.
            scores = observation.measure.token_scores
    choice = select_slots(selection, block, observation, num_kept, num_slots, head_budgets=head_budgets, scores=scores)
    kept = gather_tokens(block, choice.slots)
    return kept if selection.merge is None else selection.merge(block, kept, choice, selection.spec)


def count_kept(select: Selection, block: KVBlock, num_slots: int) -> Array:
    """i32[B]: tokens that each sequence keeps of its prompt, at most `num_slots`."""
    # Lengths are traced, and a budget is a Python function of the length: it is tabulated over all of them.
    table = jnp.asarray(select.num_kept_by_length(block.pos.shape[2]))
    return jnp.minimum(table[(block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)], num_slots)


def score_candidates(
    selection: PromptSelection, block: KVBlock, observation: Observation | None, scores: Scores | None = None
) -> Candidates:
    """Scores a layer's units for a ranking over all layers, see `ModelRanking`; `scores` as in `select_slots`."""
    select = selection.select
    num_slots = int(select.num_kept_by_length(block.pos.shape[2]).max())
    num_kept = count_kept(select, block, num_slots)
    split = split_prompt(block.pos, num_kept, num_slots, select.sinks, select.recent, select.granularity)
    # Heads compete with one another here, so scores stay apart whatever the scope.
    token_scores = score_prompt(selection, block, observation) if scores is None else scores
    unit_scores = score_units(token_scores.per_kv_head, select.sinks, select.granularity)
    unit_scores = jnp.where(evictable_mask(split, unit_scores.shape[2])[:, None], unit_scores, -jnp.inf)
    return Candidates(unit_scores, split.num_kept_units, split.num_always, token_scores)


def select_slots(
    selection: PromptSelection,
    block: KVBlock,
    observation: Observation | None,
    num_kept: Array,
    num_slots: int,
    *,
    head_budgets: HeadBudgets | None = None,
    scores: Scores | None = None,
) -> SelectedSlots:
    """Selects the most important tokens of each sequence; ties go to the earlier token.

    Representatives take a part of the budget, as units that stand for evicted ones. They are one set for the whole
    layer, chosen among the units that no head keeps for its score (KVCrush's signatures mix the heads). Where there are
    fewer, each head's next best units take the places, so that the count stays the same. A second stage keeps only a
    part of each head's tokens by the scorer, and the others by new scores.

    Args:
      selection: of the layer.
      block: prompt keys and values [B K T H], sequences left-aligned.
      observation: what the scorer asks to see; None for a scorer of keys and values alone.
      num_kept: i32[B], tokens that each sequence keeps.
      num_slots: static size of the result, at least `num_kept.max()`.
      head_budgets: divides the budget among the heads; `num_kept` and `num_slots` are then means over all heads.
      scores: what the scorer said of this prompt before, for a ranking over all layers; None: it is asked now.
    """
    select, spec = selection.select, selection.spec
    num_tokens, size = block.k.shape[2], select.granularity.size
    # Lengths are unknown while tracing: units are those of the padded prompt, and masks say which are real.
    split = split_prompt(block.pos, num_kept, num_slots, select.sinks, select.recent, select.granularity)
    scores = score_prompt(selection, block, observation) if scores is None else scores
    unit_scores = _score_units(select, scores.per_kv_head)
    if head_budgets is not None:
        head_budgets = head_budgets.for_lengths(split.length, num_tokens)
    two_stage = None
    if selection.second_stage is not None:
        new_scores = selection.second_stage.scores(block, scores.per_kv_head, observation, spec)
        two_stage = TwoStage(selection.second_stage.share, _score_units(select, new_scores))

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
    spare_slots = max(num_slots - select.sinks - select.recent, 0)
    share = 0.0 if selection.representatives is None else selection.representatives.share
    if selection.representatives is not None and (most := fraction_of(share, spare_slots // size)):
        grouped = group_into_units(scores.per_query_head, select.sinks, size)
        keys = group_into_units(block.k, select.sinks, size, axis=2)
        count = fraction_of(share, split.num_kept_units)
        # First round: what any head keeps for its score is no candidate. The second, below, fills the remaining places.
        important = over_heads.any(select_units(evictable, count))[:, 0]
        units = EvictableUnits(grouped, keys, evictable, evictable & ~important)
        chosen = selection.representatives.choose(units, count, most)
        B, U = evictable.shape
        # -1 would write to the last unit.
        index = jnp.where(chosen < 0, U, chosen)
        represented = represented.at[jnp.arange(B)[:, None], index].set(True, mode="drop")
    kept = select_units(evictable & ~represented, represented.sum(-1, dtype=jnp.int32)) | represented[:, None]
    if head_budgets is not None:  # one head may take the places of all the others
        num_slots = min(num_tokens, num_slots + head_budgets.num_other_heads(spec) * spare_slots)
    return SelectedSlots(units_to_slots(kept, split, num_tokens, num_slots, select.sinks, size), scores)


def score_prompt(selection: PromptSelection, block: KVBlock, observation: Observation | None) -> Scores:
    """Runs the scorer, and turns its author's likely mistakes into errors that name them."""
    scorer = selection.select.scorer
    name = type(scorer).__name__
    try:
        scores = scorer.scores(block, observation, selection.spec)
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
    if not isinstance(scores.per_kv_head, Tracer):  # as `kvjax check` calls it, outside of a program
        is_nan, is_real = np.isnan(to_numpy(scores.per_kv_head).astype(np.float32)), to_numpy(block.pos) >= 0
        if (is_nan & is_real).any():
            raise InvalidScores(f"{name}.scores gives NaN, which would win over every number")
    return scores


def _score_units(select: Selection, scores: Array) -> Array:
    """f32[B K S] -> f32[B K U], or f32[B 1 U] where the scope is the layer."""
    if select.scope == "layer":
        scores = over_heads.mean(scores)
    return score_units(scores, select.sinks, select.granularity)


def make_selection(
    scorer: Scorer, budget: TokenBudget, sinks: int = 0, recent: int = 0, unit: str = "token", per: Scope = "head"
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
