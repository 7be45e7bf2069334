"""DMS: every head keeps the tokens whose score reaches a threshold, few or many."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import method_api as kv
from kvjax.methods.attention_gate import ThresholdBudgets


@dataclasses.dataclass(frozen=True)
class DelayedEviction(kv.Policy):
    """Evicts a token whose score is below `threshold` when it leaves the window, in the prompt and while decoding.

    The window is the selection's recent tokens, and its scorer scores a new token as a prompt of its own.
    """

    threshold: float

    def check(self, components: kv.Components) -> None:
        c, select = components, components.select
        if select is None:
            raise kv.IncompatibleMethod(
                "dms:decode=true scores tokens by an eviction method's scorer and finds none; compose it with one, as "
                "in 'kvzap:budget=100%,recent=128 + dms:threshold=-4,decode=true'"
            )
        scorer = select.scorer
        if scorer.num_queries != 0 or scorer.needs_output or scorer.replay is not None:
            raise kv.IncompatibleMethod(
                f"component `decode`, {self}, scores each decoded token as it comes, and {type(scorer).__name__} "
                "(component `select`) reads queries, the output projection or a second pass; take a scorer of single "
                "tokens, as in 'kvzap:budget=100%,recent=128 + dms:threshold=-4,decode=true', or leave decode=true out"
            )
        if select.granularity.size > 1 or select.scope == "layer":
            raise kv.IncompatibleMethod(
                f"component `decode`, {self}, evicts single tokens of each head, and component `select` keeps units or "
                "layers alike; leave `unit` and `per` out"
            )
        others = {"second_stage": c.second_stage, "representatives": c.representatives, "merge": c.merge}
        for name, other in (others | {"layer_budgets": c.layer_budgets}).items():
            if other is not None:
                raise kv.IncompatibleMethod(
                    f"component `decode`, {self}, lets every token stay or leave by its own score, and component "
                    f"`{name}`, {type(other).__name__}, decides when the prompt ends; leave one of them out"
                )

    def with_selection(self, selection: kv.PromptSelection) -> kv.Policy:
        return BoundDelayedEviction(self.threshold, selection.select)

    def is_constant(self, components: kv.Components) -> bool:
        return components.select is None or components.select.max_kept() is not None


@dataclasses.dataclass(frozen=True)
class BoundDelayedEviction(DelayedEviction):
    """`DelayedEviction` over the selection of a layer. Its state are the scores of the tokens, f32[B K S]."""

    select: kv.Selection

    @property
    def needs_hidden(self) -> bool:
        """New tokens come with their hidden states where the scorer reads those."""
        return self.select.scorer.needs_hidden

    def num_slots(self) -> int:
        budget = self.select.max_kept()
        assert budget is not None  # else the slots are those of a text
        return budget + 1

    def num_slots_of_text(self, text_tokens: int) -> int:
        return self.num_slots() if self.select.max_kept() is not None else self.select.num_kept(text_tokens) + 1

    def num_kept(self, prompt: int) -> int:
        return prompt if self.select.max_kept() is None else super().num_kept(prompt)

    def init(
        self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None, num_slots: int
    ) -> tuple[kv.Array, kv.Array]:
        scores = self._score_kept(spec, block, observation)
        pos = jnp.broadcast_to(block.pos, scores.shape)
        protected = self._is_protected(pos, pos.max((1, 2))[:, None, None])
        stays = (pos >= 0) & (protected | (scores >= self.threshold))
        count = min(num_slots - 1, pos.shape[2])
        chosen = kv.top_slots(jnp.where(protected, jnp.inf, scores), jnp.where(stays, pos, -1), count)
        return chosen, kv.policy_state_at(jnp.where(pos >= 0, scores, 0.0), chosen, num_slots)

    def _score_kept(self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None) -> kv.Array:
        """Scores the tokens that the selection has kept of the prompt, f32[B K S]."""
        hidden = None if observation is None else observation.hidden_states
        if hidden is None or hidden.shape[2] == block.k.shape[2]:  # all tokens of the prompt are here, in order
            return self.select.scorer.scores(block, observation, spec).per_kv_head
        assert observation is not None
        others, pos = observation._replace(hidden_states=None), jnp.broadcast_to(block.pos, block.k.shape[:3])

        def score_head(head: kv.Array) -> kv.Array:
            """Scores by the hidden states of the tokens of one head."""
            own_pos = lax.dynamic_index_in_dim(pos, head, 1)
            taken = jnp.take_along_axis(hidden, jnp.maximum(own_pos, 0)[..., None], 2)
            own_block, observation = dataclasses.replace(block, pos=own_pos), others._replace(hidden_states=taken)
            own = self.select.scorer.scores(own_block, observation, spec)
            return lax.dynamic_index_in_dim(own.per_kv_head, head, 1, keepdims=False)

        return jnp.moveaxis(lax.map(score_head, jnp.arange(pos.shape[1], dtype=jnp.int32)), 0, 1)

    def _is_protected(self, pos: kv.Array, newest: kv.Array) -> kv.Array:
        """bool[B K S]: the sinks, and the window before the newest position i32[B 1 1]."""
        return (pos < self.select.sinks) | (pos > newest - self.select.recent)

    def observe_token(self, spec: kv.LayerSpec, state: kv.LayerState, new: kv.KVBlock) -> kv.Array:
        B, K, _, H = new.k.shape
        observation = None
        if self.needs_hidden:
            if new.hidden is None:
                raise kv.KvjaxError(
                    f"{type(self.select.scorer).__name__} scores decoded tokens by their hidden states, and a step "
                    "came without; give them with every token, `KVBlock.hidden`"
                )
            no_queries = jnp.zeros((B, K, spec.num_groups, 0, H), new.k.dtype)
            observation = kv.Observation(no_queries, jnp.zeros((B, 0), jnp.int32), hidden_states=new.hidden)
        scores = self.select.scorer.scores(new, observation, spec).per_kv_head
        is_new = (state.pos == new.pos) & (new.pos >= 0)
        return jnp.where(is_new, scores, state.policy_state)

    def after_token(
        self, spec: kv.LayerSpec, state: kv.LayerState, weights: kv.Array | None, q_pos: kv.Array
    ) -> tuple[kv.Array, kv.Array]:
        newest, scores = q_pos[:, None], state.policy_state
        may_leave = (state.pos >= 0) & ~self._is_protected(state.pos, newest)
        pos = jnp.where(may_leave & (scores < self.threshold) & (newest >= 0), -1, state.pos)
        return kv.evict_lowest(scores, pos, may_leave & (pos >= 0), newest >= 0), scores


@kv.register_method(example="kvzap:budget=512 + dms:threshold=-4", family="component over a selection")
def dms(
    threshold: Annotated[float, kv.Within("(-inf, inf)")] = -4.0, page: int = 16, decode: bool = False
) -> kv.Method:
    """Lets each head keep the tokens whose score is at least a threshold, up to the selection's budget.

    Use it as in 'kvzap:budget=50%,recent=128 + dms:threshold=-4'; the selection's `recent` is the sliding window in
    which no token is evicted, and `budget=100%` leaves the threshold alone to decide. With decode=true tokens of the
    answer are evicted too, when they leave the window.

    Formula:
      head h keeps the token s of a text of T tokens if score_hs >= threshold or s >= T - recent; T is the prompt's
      length, or with decode=true that of the text so far

    Differs:
      This is kvpress' `DMSPress`, dense attention of the prompt and eviction after it; the paper trains the model to
      evict. A threshold gives no number of tokens, and shapes must be known beforehand: memory is reserved for the
      budget, and if the heads of a layer together have more tokens above the threshold, the best of them all stay.
      With decode=true (kvpress: `decoding=True`) each head has slots for the budget, which new tokens take again as
      old ones leave; a head that would overflow evicts its lowest score. The scorer sees a decoded token alone, and of
      a prompt the tokens that the budget has kept, which matters for scores that compare tokens (`keydiff`).

    Args:
      threshold: on the scale of the selection's scores (-4 with KVzap's, which are logarithms).
      page: slots of a page, in which heads of unequal length are stored; unused with decode=true.
      decode: whether decoded tokens are scored and evicted as well.

    Reference:
      Dynamic Memory Sparsification, Lancucki et al. 2025, arXiv 2506.05345; its public code, NVIDIA/kvpress
    """
    if decode:
        return kv.Method(decode=DelayedEviction(threshold))
    above = float(np.nextafter(np.float32(threshold), np.float32(-np.inf)))  # the next number below, which leaves
    return kv.Method(side_store=kv.PagedHeads(ThresholdBudgets(above), page))
