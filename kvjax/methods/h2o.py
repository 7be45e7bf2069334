"""H2O: while decoding, evicts the token with the least accumulated attention."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from kvjax import method_api as kv


@dataclasses.dataclass(frozen=True)
class H2O(kv.Policy):
    """Keeps heavy hitters and recent tokens, chosen again at every step (Zhang et al. 2023, 2306.14048, section 4).

    A token's score is the attention it has received, softmax over the kept tokens, summed over the query heads of its
    key/value head; the prompt's queries start it, in full causal attention. A step attends to all heavy + recent tokens
    and to its own, adds its attention, and then, over budget, evicts the lowest score that is not among the last
    `recent` (the newest included); ties go to the older token. So there is one slot more, for the newest token. A
    longer prompt is cut once: the best `heavy` of all but the last `recent` stay. Kept tokens keep their positions (the
    paper's streaming variant re-indexes them). The fields are the arguments of `h2o`.
    """

    heavy: kv.NonNegativeInt
    recent: kv.PositiveInt
    decay: kv.UnitFloat = 1.0
    normalise: Literal["none", "visible-count"] = "none"
    granularity: Literal["kv", "layer"] = "kv"

    num_queries: ClassVar[int | None] = None  # all of the prompt's
    needs_weights: ClassVar[bool] = True

    __post_init__ = kv.check_fields

    def num_slots(self) -> int:
        return self.heavy + self.recent + 1

    def init(
        self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None, slots: int
    ) -> tuple[kv.Array, kv.Array]:
        observation = kv.require_observation(observation, "H2O", "all queries")
        last = kv.over_heads.max(block.pos.max(2))  # [B 1]
        age = jnp.where(observation.pos < 0, 0, last - observation.pos).astype(jnp.float32)
        received = kv.attention_mass(block, observation, jnp.float32(self.decay) ** age, spec.rule)[0]
        score = self._pool_heads(received.sum(2))
        pos = jnp.broadcast_to(block.pos, score.shape)
        is_recent = pos > last[..., None] - self.recent
        rank = jnp.where(is_recent, jnp.inf, self._normalize(score, pos, last[..., None], spec))
        chosen = kv.top_slots(rank, pos, min(self.heavy + self.recent, slots))
        return chosen, kv.policy_state_at(score, chosen, slots)

    def after_token(
        self, spec: kv.LayerSpec, state: kv.LayerState, weights: kv.Array, q_pos: kv.Array
    ) -> tuple[kv.Array, kv.Array]:
        t = q_pos[:, None]  # [B 1 1]
        # The newest token's slot still has the score of an evicted token.
        before = jnp.where(state.pos == t, 0.0, state.policy_state)
        score = jnp.where(t >= 0, self.decay * before + self._pool_heads(weights.sum(2)), state.policy_state)
        may_leave = (state.pos >= 0) & (state.pos <= t - self.recent)
        rank = self._normalize(score, state.pos, t, spec)
        return kv.evict_lowest(rank, state.pos, may_leave, t >= 0), score

    def _pool_heads(self, received: kv.Array) -> kv.Array:
        """Averages attention f32[B K S] over the heads that choose together."""
        if self.granularity == "kv":
            return received
        return jnp.broadcast_to(kv.over_heads.mean(received), received.shape)

    def _normalize(self, score: kv.Array, pos: kv.Array, t: kv.Array, spec: kv.LayerSpec) -> kv.Array:
        """Divides scores f32[B K S] by the queries that could see the tokens at pos, up to time t i32[B 1 1]."""
        if self.normalise == "none":
            return score
        num_queries = t - pos + 1
        num_queries = num_queries if spec.rule.window is None else jnp.minimum(num_queries, spec.rule.window)
        return score / jnp.maximum(num_queries, 1).astype(jnp.float32)


@kv.register_method(example="h2o:heavy=256,recent=256", family="eviction at every step", sized_by="heavy,recent")
def h2o(
    heavy: int = 512,
    recent: int = 512,
    decay: float = 1.0,
    normalise: Literal["none", "visible-count"] = "none",
    granularity: Literal["kv", "layer"] = "kv",
) -> kv.Method:
    """Keeps heavy hitters and recent tokens, selected again at every step, in constant memory.

    Formula:
      score_s = sum over queries t >= s of softmax over the cached tokens; over budget, the lowest outside the last
      `recent` leaves

    Differs:
      The authors' simulation masks tokens and drops none, and hides one token for a step; their real_drop is this
      without grouped heads. KVCache-Factory and kvpress prune the prompt only.

    Args:
      heavy: heavy hitters that stay of each key/value head (the paper: a tenth of the prompt).
      recent: last tokens that always stay (the paper: a tenth of the prompt).
      decay: factor on all scores before each step, A2SF's forgetting factor: 1 is H2O, 0 scores by the last query
        alone, as TOVA does.
      normalise: "none" (the paper; it favors old tokens) or "visible-count", which divides a score by the number of
        queries that could see the token.
      granularity: "kv", where each key/value head has tokens of its own (the paper, without grouped heads), or "layer",
        where the mean over the heads selects for all.

    Reference:
      H2O, Zhang et al. 2023, arXiv 2306.14048, section 4; decay: A2SF, arXiv 2407.20485
    """
    return kv.Method(decode=H2O(heavy, recent, decay, normalise, granularity))
