"""KVCompose: each head keeps its own best tokens, and a layer as many as its composite tokens are worth."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from kvjax import method_api as kv
from kvjax.cache.eviction.selection import score_candidates
from kvjax.methods.kvzip import ReplayAttention

WHOLE_PROMPT = 2**30  # tokens of a chunk that no prompt exceeds


@dataclasses.dataclass(frozen=True)
class RepeatedAttention(ReplayAttention):
    """Scores a token by the most attention that it gets in a repetition, mean over query heads, plus all heads' mean.

    The fields are those of `ReplayAttention`, and `value_norms` of `kvcompose`.
    """

    value_norms: bool = False

    def scores(self, block: kv.KVBlock, observation: kv.Observation | None, spec: kv.LayerSpec) -> kv.Scores:
        received = self.require_observation(observation).replay_scores
        assert received is not None
        if self.value_norms:
            received = received * jnp.linalg.norm(block.clean().v.astype(jnp.float32), axis=-1)
        return kv.token_scores(received + kv.over_heads.mean(received), block)


class Composites(NamedTuple):
    """The composite units of one layer: unit c is the c-th best of every head."""

    scores: kv.Array  # f32[B U], means over the heads, descending; -inf for what is no whole unit of the sequence
    quota: kv.Array  # i32[B], units that each head would keep if all layers kept equally many
    always: kv.Array  # i32[B], tokens that stay in any case


@dataclasses.dataclass(frozen=True)
class CompositeRanking(kv.LayerBudgets):
    """Keeps the best composite units of all layers (Akulov et al. 2025, arXiv 2509.05165).

    The first layer's composites count as the best of all layers', place by place, so that no layer keeps more. A layer
    that wins none keeps one unit, in addition to the budget.
    """

    def measure(
        self, selection: kv.PromptSelection, block: kv.KVBlock, observation: kv.Observation | None
    ) -> Composites:
        units = score_candidates(selection, block, observation)
        return Composites(kv.over_heads.mean(-jnp.sort(-units.scores, axis=-1))[:, 0], units.quota, units.always)

    def allocate_tokens(self, selection: kv.PromptSelection, measures: Composites, lengths: kv.Array) -> kv.Array:
        L, B, U = measures.scores.shape
        scores = measures.scores.at[0].set(measures.scores.max(0))
        ranked = scores.swapaxes(0, 1).reshape(B, L * U)
        best = kv.top_k_mask(ranked, ranked > -jnp.inf, measures.quota.sum(0, dtype=jnp.int32)).reshape(B, L, U)
        num_units = jnp.maximum(best.sum(-1, dtype=jnp.int32).T, 1)
        tokens = measures.always + num_units * selection.select.granularity.size
        return jnp.minimum(tokens, lengths[None])


@kv.register_method(example="kvcompose:budget=512", family="eviction after the prompt")
def kvcompose(
    budget: kv.TokenBudget = 1024,
    chunk: kv.NonNegativeInt = 0,
    value_norms: bool = False,
) -> kv.Method:
    """Keeps the tokens that a repetition of the prompt attends to, equally many in all heads of a layer.

    The slots of a layer hold composite tokens: slot c is each head's own c-th best. Layers compete for the budget by
    their composites. It costs about two more prefills. Bytes are planned as an upper bound.

    Formula:
      a_s = mean over a head's query heads of the max over queries t of the repetition of softmax(q_t k_s); score_s =
      a_s + mean of a_s over heads; composite c = mean over heads of the c-th largest score; the L b largest composites
      of all L layers stay

    Differs:
      The paper's task prompts, kvpress' `register_prompt_ids`, are not here: the prompt itself is repeated, as in
      kvpress (KVComposePress) without them. Heads of unequal length, its `structured=False`, are not here; 'kvzip' has
      them.

    Args:
      budget: as in `make_selection`, on average over the layers.
      chunk: tokens of the prompt that are repeated at a time, which bounds memory; 0 for the whole prompt (kvpress).
      value_norms: whether scores are multiplied by the norm of the value first.

    Reference:
      KVCompose, Akulov et al. 2025, arXiv 2509.05165; constants of its press in kvpress
    """
    scorer = RepeatedAttention(
        chunk or WHOLE_PROMPT, lead=0, sinks=0, reduce="mean", has_instructions=False, value_norms=value_norms
    )
    return kv.Method(select=kv.make_selection(scorer, budget), layer_budgets=CompositeRanking())
