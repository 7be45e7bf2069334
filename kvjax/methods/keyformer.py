"""Keyformer: H2O's heavy hitters, scored with noise and at a temperature that rises while decoding."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax import method_api as kv


@kv.exportable
class KeyformerState(NamedTuple):
    """The scores of the kept tokens."""

    score: kv.Array  # f32[B K S], of the token in each slot
    prompt: kv.Array  # i32[B], tokens of the prompt, from which steps are counted


@dataclasses.dataclass(frozen=True)
class Keyformer(kv.Policy):
    """Keeps key tokens and recent tokens, chosen again at every step (Adnan et al. 2024, arXiv 2403.09054).

    A token's score is a sum over all queries since its own and over the query heads of its key/value head. Each query
    adds the token's softmax weight among the kept tokens, with Gumbel noise added to the logits and at a temperature.
    The temperature is tau for the prompt's queries, and rises linearly over `steps` steps to tau_end, where it stays.
    The attention itself has no noise and no temperature. After a step that makes more than `budget` tokens, the lowest
    score that is not among the last `recent` is evicted; ties go to the older token. A longer prompt is cut once. Kept
    tokens keep their positions.

    The noise depends on the seed, the layer, the head and the positions of query and key, and on nothing else. The
    fields are the arguments of `keyformer`, and the index of the layer, set by `at`.
    """

    budget: int
    recent: kv.PositiveInt
    tau: kv.PositiveFloat = 1.0
    tau_end: kv.PositiveFloat = 2.0
    steps: kv.PositiveInt = 100
    seed: int = 0
    layer: int = 0

    num_queries: ClassVar[int | None] = None  # all of the prompt's
    needs_weights: ClassVar[bool] = True

    def __post_init__(self):
        kv.check_fields(self)
        if self.budget < self.recent:
            raise kv.KvjaxError(f"Keyformer: budget must be at least recent={self.recent}, got {self.budget}")

    def at(self, spec: kv.LayerSpec) -> Keyformer:
        return dataclasses.replace(self, layer=spec.index)

    def num_slots(self) -> int:
        return self.budget + 1

    def init(
        self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None, slots: int
    ) -> tuple[kv.Array, KeyformerState]:
        observation = kv.require_observation(observation, "Keyformer", "all queries")
        last = kv.over_heads.max(block.pos.max(2))  # [B 1]

        def perturb(logits: kv.Array, q_pos: kv.Array, pos: kv.Array) -> kv.Array:
            return (logits + self.noise(spec, logits.shape[1], q_pos, pos)) / self.tau

        every = jnp.ones(observation.pos.shape)
        score = kv.attention_mass(block, observation, every, spec.rule, logit_transform=perturb)[0].sum(2)
        pos = jnp.broadcast_to(block.pos, score.shape)
        rank = jnp.where(pos > last[..., None] - self.recent, jnp.inf, score)
        chosen = kv.top_slots(rank, pos, min(self.budget, slots))
        return chosen, KeyformerState(kv.policy_state_at(score, chosen, slots), last[:, 0] + 1)

    def after_token(
        self, spec: kv.LayerSpec, state: kv.LayerState, weights: kv.Array, q_pos: kv.Array
    ) -> tuple[kv.Array, KeyformerState]:
        t, prompt = q_pos[:, None], state.policy_state.prompt  # [B 1 1], [B]
        step = jnp.clip(t - prompt[:, None, None] + 1, 0, self.steps).astype(jnp.float32)
        tau = self.tau + (self.tau_end - self.tau) * step / self.steps
        noise = self.noise(spec, weights.shape[1], q_pos, state.pos)[:, :, :, 0]
        added = temper_weights(weights, noise, tau[..., None]).sum(2)
        # The newest token's slot still has the score of an evicted token.
        before = jnp.where(state.pos == t, 0.0, state.policy_state.score)
        score = jnp.where(t >= 0, before + added, state.policy_state.score)
        may_leave = (state.pos >= 0) & (state.pos <= t - self.recent)
        return kv.evict_lowest(score, state.pos, may_leave, t >= 0), KeyformerState(score, prompt)

    def noise(self, spec: kv.LayerSpec, num_own_heads: int, q_pos: kv.Array, pos: kv.Array) -> kv.Array:
        """Draws Gumbel noise for this device's key/value heads.

        Args:
          spec: the layer.
          num_own_heads: key/value heads on this device.
          q_pos: i32[B T], positions of the queries.
          pos: i32[B 1|K S], positions of the keys.

        Returns:
          f32[B K G T S].
        """
        layer = jnp.full((1, 1, 1, 1, 1), self.layer, jnp.int32)
        head = kv.over_heads.first_head(num_own_heads) + jnp.arange(num_own_heads, dtype=jnp.int32)
        head = head[None, :, None, None, None]
        group = jnp.arange(spec.num_groups, dtype=jnp.int32)[None, None, :, None, None]
        bits = kv.draw(self.seed, layer, head, group, q_pos[:, None, None, :, None], pos[:, :, None, None, :])
        uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * np.float32(2**-23)  # never 0 or 1
        return -jnp.log(-jnp.log(uniform))


def temper_weights(weights: kv.Array, noise: kv.Array, tau: kv.Array) -> kv.Array:
    """Recomputes softmax weights f32[... S] with noise on the logits, at temperature tau; 0 stays 0."""
    logits = jnp.where(weights > 0, (jnp.log(weights) + noise) / tau, kv.attention.MASKED_LOGIT)
    return kv.attention.softmax(logits)


@kv.register_method(example="keyformer:budget=512,recent=153", family="eviction at every step")
def keyformer(
    budget: int = 1024, recent: int = 307, tau: float = 1.0, tau_end: float = 2.0, steps: int = 100, seed: int = 0
) -> kv.Method:
    """Keeps key tokens and recent tokens, selected again at every step by attention with noise, in constant memory.

    Formula:
      score_s = sum over queries t >= s of softmax_s((q_t k_s / sqrt(H) + Gumbel noise) / tau_t); over budget, the
      lowest outside the last `recent` leaves

    Differs:
      The authors' code masks tokens and drops none, hides every token for good that leaves the recent ones, so that
      only the prompt has key tokens, and adds scores over the batch; here the rule is the paper's. Its softmax, with
      noise, is over the kept tokens, without a model's learned sinks.

    Args:
      budget: tokens that stay of each key/value head, `recent` included (the authors' runs: 60 % of the prompt).
      recent: last tokens that always stay (the authors' runs: 30 % of the budget).
      tau: temperature for the prompt (the paper's).
      tau_end: temperature at the end of its rise (the paper's).
      steps: decoded tokens over which the temperature rises. Give the length of the answer, as the paper does; 100 is a
        rise of 0.01 per token, the default of the authors' configuration.
      seed: seed of the noise.

    Reference:
      Keyformer, Adnan et al. 2024, arXiv 2403.09054, and its public code, d-matrix-ai/keyformer-llm
    """
    return kv.Method(decode=Keyformer(budget, recent, tau, tau_end, steps, seed))
