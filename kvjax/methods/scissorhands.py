"""Scissorhands: evicts the tokens that are often below the mean attention, many at a time."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax import method_api as kv
from kvjax.cache.eviction.decode_policy import sort_newest_first


@dataclasses.dataclass(frozen=True)
class Scissorhands(kv.Policy):
    """Counts how often a token's attention is below the mean, and evicts the highest counts (Liu et al. 2023).

    A step attends to the kept tokens and to its own. If that makes more than `budget` tokens of a key/value head, the
    cache is compressed to budget - m tokens, m = floor(drop * budget), and fills again. Counts are taken over the last
    `history` steps, those of the last `recent` tokens are set to 0, and the highest are evicted; ties go to the older
    token, so that recent tokens always stay. A step counts a token when its softmax weight, averaged over the query
    heads of its key/value head, is below 1/t, with t the tokens that the step attended to. There is one slot more than
    the budget, for the newest token. A prompt above the budget is compressed at once, by the full attention of its last
    `history` queries.

    The history is one count per slot, not `history` bits per slot: the step of the next compression is known, so only
    the last `history` steps before it are counted. This cannot look back beyond the previous compression; with
    m + 1 >= history (the paper's setting) it never has to. The fields are the arguments of `scissorhands`.
    """

    budget: Annotated[int, kv.Within("[2, inf)")]
    history: kv.PositiveInt = 400
    recent: kv.PositiveInt = 10
    drop: Annotated[float, kv.Within("[0, 1)")] = 0.5

    needs_weights: ClassVar[bool] = True

    def __post_init__(self):
        kv.check_fields(self)
        if self.low < self.recent:
            raise kv.KvjaxError(
                f"Scissorhands drops to {self.low} of {self.budget} tokens and keeps the last recent={self.recent}; "
                f"use recent={self.low} or less, or a smaller drop than {self.drop}"
            )

    @property
    def low(self) -> int:
        """Tokens of a head after a compression."""
        return self.budget - int(self.drop * self.budget)

    @property
    def num_queries(self) -> int:
        return self.history

    def num_slots(self) -> int:
        return self.budget + 1

    def num_kept(self, prompt: int) -> int:
        return prompt if prompt <= self.budget else self.low

    def init(
        self, spec: kv.LayerSpec, block: kv.KVBlock, observation: kv.Observation | None, slots: int
    ) -> tuple[kv.Array, kv.Array]:
        observation = kv.require_observation(observation, "Scissorhands", f"the last {self.history} queries")
        length = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
        end = kv.over_heads.max(block.pos.max(2))[:, 0] + 1
        is_over = length > self.budget
        # In a prompt that fits, only queries within `history` of the next compression count.
        is_counted = is_over[:, None] | (observation.pos > self.budget - self.history)
        is_counted &= observation.pos >= jnp.maximum(end - self.history, 0)[:, None]
        count = count_below_mean(block, observation, is_counted, spec.rule)
        pos = jnp.broadcast_to(block.pos, count.shape)
        is_over = is_over[:, None, None]
        rank = jnp.where(pos > end[:, None, None] - 1 - self.recent, 0, -count)
        chosen = kv.top_slots(rank, pos, min(self.budget, slots))
        place = jnp.arange(chosen.shape[2])[None, None]  # tokens are in the order of their rank
        chosen = jnp.where(is_over & (place >= self.low), -1, chosen)
        return chosen, jnp.where(is_over, 0, kv.policy_state_at(count, chosen, slots))

    def after_token(
        self, spec: kv.LayerSpec, state: kv.LayerState, weights: kv.Array, q_pos: kv.Array
    ) -> tuple[kv.Array, kv.Array]:
        t, real = q_pos[:, None], q_pos[:, None] >= 0  # [B 1 1]
        is_visible = kv.attention.visible(state.pos, q_pos, spec.rule)[:, :, 0, 0]
        mean = 1 / jnp.maximum(is_visible.sum(2, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        steps_left = (state.pos < 0).sum(2, keepdims=True, dtype=jnp.int32)[:, :1]  # until the next compression
        is_low = real & (steps_left < self.history) & is_visible & (weights.mean(2) < mean)
        # The newest token's slot still has the count of an evicted token.
        before = jnp.where((state.pos == t) & real, 0, state.policy_state)
        count, is_due = before + is_low.astype(jnp.int32), real & (steps_left == 0)

        def compress(pos: kv.Array, count: kv.Array) -> tuple[kv.Array, kv.Array]:
            order = sort_newest_first(jnp.where(pos > t - self.recent, 0, -count), pos)
            place = jnp.argsort(order, axis=2).astype(jnp.int32)
            return jnp.where(is_due & (place >= self.low), -1, pos), jnp.where(is_due, 0, count)

        return lax.cond(is_due.any(), compress, lambda pos, count: (pos, count), state.pos, count)


def count_below_mean(
    block: kv.KVBlock, observation: kv.Observation, is_counted: kv.Array, rule: kv.attention.Rule, at_once: int = 16
) -> kv.Array:
    """Counts the queries that give a slot less than the mean weight, under the full causal softmax over the prompt.

    Args:
      block: the prompt.
      observation: its queries.
      is_counted: bool[B Q], the queries that count.
      rule: the layer's window and soft cap.
      at_once: queries in memory at one time, so that memory grows with at_once x S, never with Q x S.

    Returns:
      i32[B K S].
    """

    def add(total: kv.Array, queries: tuple[kv.Array, kv.Array]) -> tuple[kv.Array, None]:
        q, q_pos = queries
        is_visible = kv.attention.visible(block.pos, q_pos, rule)
        p = kv.attention_rows(block, observation._replace(q=q, pos=q_pos, softmax_lse=None), rule).mean(2)
        is_visible = is_visible[:, :, 0]  # [B K|1 q S]
        mean = 1 / jnp.maximum(is_visible.sum(-1, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        return total + (is_visible & (p < mean)).sum(2, dtype=jnp.int32), None

    counted_pos = jnp.where(is_counted, observation.pos, -1)
    blocks = (
        kv.attention.split_blocks(observation.q, 3, at_once),
        kv.attention.split_blocks(counted_pos, 1, at_once, -1),
    )
    return lax.scan(add, kv.vary(jnp.zeros(block.k.shape[:3], jnp.int32)), blocks)[0]


@kv.register_method(example="scissorhands:budget=512", family="eviction at every step")
def scissorhands(budget: int = 1024, history: int = 400, recent: int = 10, drop: float = 0.5) -> kv.Method:
    """Drops, in batches, the tokens whose attention was most often below the mean, in constant memory.

    Formula:
      count_s = how often softmax(q_t k_s) < 1 / (cached tokens) in the last `history` steps; over budget, the highest
      counts leave, m at a time

    Differs:
      All layers have the same budget, where the paper gives later layers more (unverified: how much). The history is
      one count per slot since the last compression; with m + 1 >= history, the paper's setting, that is the same.

    Args:
      budget: tokens of each key/value head.
      history: last steps over which low attention is counted.
      recent: last tokens that always stay.
      drop: fraction of the budget that is dropped at a time.

    Reference:
      Scissorhands, Liu et al. 2023, arXiv 2305.17118, section 4
    """
    return kv.Method(decode=Scissorhands(budget, history, recent, drop))
