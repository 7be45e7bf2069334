"""Scissorhands: tokens that are often below the mean attention are dropped, many at a time."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax.cache.bound_layer import MethodLayer
from kvjax.cache.eviction.decode_policy import (
    Policy,
    check_minimum,
    policy_state_at,
    require_observation,
    sort_newest_first,
    top_slots,
)
from kvjax.cache.method import Method
from kvjax.cache.protocol import LayerState
from kvjax.core.attention import MASKED_LOGIT, scores, visible, weights
from kvjax.core.attention_mass import Observation
from kvjax.core.mesh import over_heads, vary
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError
from kvjax.methods.registry import register_method


@dataclasses.dataclass(frozen=True)
class Scissorhands(Policy):
    """Counts how often a token's attention is below the mean, and drops those of the highest count (arXiv 2305.17118).

    Liu et al. 2023, section 4. A step attends to what is kept and to itself. If that makes more than `budget` tokens
    of a key/value head, the cache is compressed to budget - m tokens, m = floor(drop * budget), and fills again: the
    counts are taken over the last `history` steps, those of the last `recent` tokens are set to 0, and the highest
    go; of equal counts the older goes (so the recent ones always stay). A step counts a token when its softmax weight,
    averaged over the query heads of its key/value head, is below 1/t, with t the tokens that step attended to. There is
    one slot more than the budget, for the token that comes before the others leave. A prompt above the budget is
    compressed right away, by the full attention of its last `history` queries.

    The history is held as one count per slot, not as history bits per slot: the step of the next compression is known,
    so only the last `history` steps before it are counted. What this cannot do is look back beyond the previous
    compression; with m + 1 >= history (the paper's setting) there is nothing to look back to.
    """

    budget: int
    history: int = 400
    recent: int = 10
    drop: float = 0.5

    needs_weights: ClassVar[bool] = True

    def __post_init__(self):
        check_minimum("Scissorhands", budget=(self.budget, 2), history=(self.history, 1), recent=(self.recent, 1))
        if not 0 <= self.drop < 1:
            raise KvjaxError(f"drop of Scissorhands is a share of the budget in [0, 1), got {self.drop}; it uses 0.5")
        if self.low < self.recent:
            raise KvjaxError(
                f"Scissorhands drops to {self.low} of {self.budget} tokens and keeps the last recent={self.recent}; "
                f"use recent={self.low} or less, or a smaller drop than {self.drop}"
            )

    @property
    def low(self) -> int:
        """Tokens left by a compression."""
        return self.budget - int(self.drop * self.budget)

    @property
    def num_queries(self) -> int:
        """The last queries of the prompt that it looks at."""
        return self.history

    def num_slots(self, layer: MethodLayer) -> int:
        return self.budget + 1

    def num_kept(self, layer: MethodLayer, prompt: int) -> int:
        return prompt if prompt <= self.budget else self.low

    def init(
        self, layer: MethodLayer, block: KVBlock, observation: Observation | None, slots: int
    ) -> tuple[Array, Array]:
        observation = require_observation(observation, "Scissorhands", f"the last {self.history} queries")
        held = (block.pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)  # [B]
        end = over_heads.max(block.pos.max(2))[:, 0] + 1
        over = held > self.budget
        counts = over[:, None] | (observation.pos > self.budget - self.history)
        counts &= observation.pos >= jnp.maximum(end - self.history, 0)[:, None]
        count = below_mean(block, observation, counts, layer.spec.window)
        pos = jnp.broadcast_to(block.pos, count.shape)
        over = over[:, None, None]
        rank = jnp.where(pos > end[:, None, None] - 1 - self.recent, 0, -count)
        chosen = top_slots(rank, pos, min(self.budget, slots))
        place = jnp.arange(chosen.shape[2])[None, None]  # they come in the order of their rank
        chosen = jnp.where(over & (place >= self.low), -1, chosen)
        return chosen, jnp.where(over, 0, policy_state_at(count, chosen, slots))

    def after_token(self, layer: MethodLayer, state: LayerState, weights: Array, q_pos: Array) -> tuple[Array, Array]:
        t, real = q_pos[:, None], q_pos[:, None] >= 0  # [B 1 1]
        seen = visible(state.pos, q_pos, layer.spec.window)[:, :, 0, 0]
        mean = 1 / jnp.maximum(seen.sum(2, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        left = (state.pos < 0).sum(2, keepdims=True, dtype=jnp.int32)[:, :1]  # steps until the compression
        counts = real & (left < self.history) & seen & (weights.mean(2) < mean)
        # What was in the slot of the newest token before it came does not count.
        before = jnp.where((state.pos == t) & real, 0, state.policy_state)
        count, due = before + counts.astype(jnp.int32), real & (left == 0)

        def keep_all(pos: Array, count: Array, t: Array, due: Array) -> tuple[Array, Array]:
            return pos, count

        return lax.cond(due.any(), self._compress, keep_all, state.pos, count, t, due)

    def _compress(self, pos: Array, count: Array, t: Array, due: Array) -> tuple[Array, Array]:
        """Of rows that are due, all but `low` slots of each head are emptied."""
        order = sort_newest_first(jnp.where(pos > t - self.recent, 0, -count), pos)
        place = jnp.argsort(order, axis=2).astype(jnp.int32)
        return jnp.where(due & (place >= self.low), -1, pos), jnp.where(due, 0, count)


def below_mean(block: KVBlock, observation: Observation, counts: Array, window: int | None, at_once: int = 16) -> Array:
    """How many of the queries with counts bool[B Q] give a slot less than the mean weight, i32[B K S].

    Full causal softmax over the prompt, the mean over its query heads; memory grows with at_once x S, never Q x S.
    """
    Q = observation.pos.shape[1]
    blocks = -(-Q // at_once)
    grow = [(0, blocks * at_once - Q)]
    q = jnp.pad(observation.q, [(0, 0)] * 3 + grow + [(0, 0)])
    t = jnp.pad(jnp.where(counts, observation.pos, -1), [(0, 0), *grow], constant_values=-1)

    def add(total, i):
        qi, ti = (lax.dynamic_slice_in_dim(x, i * at_once, at_once, a) for x, a in ((q, 3), (t, 1)))
        seen = visible(block.pos, ti, window)
        p, _, l = weights(jnp.where(seen, scores(qi, block.k), MASKED_LOGIT))
        p = (p / jnp.maximum(l, 1e-30)[..., None]).mean(2)
        seen = seen[:, :, 0]  # [B K|1 q S]
        mean = 1 / jnp.maximum(seen.sum(-1, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        return total + (seen & (p < mean)).sum(2, dtype=jnp.int32), None

    zero = vary(jnp.zeros(block.k.shape[:3], jnp.int32))
    return lax.scan(add, zero, jnp.arange(blocks, dtype=jnp.int32))[0]


@register_method(example="scissorhands:budget=512", family="eviction at every step")
def scissorhands(budget: int = 1024, history: int = 400, recent: int = 10, drop: float = 0.5) -> Method:
    """Drops, in batches, the tokens whose attention was most often below the mean, in constant memory.

    Formula:
      count_s = how often softmax(q_t k_s) < 1 / (cached tokens) in the last `history` steps; over budget, the highest
      counts leave, m at a time

    Differs:
      All layers have the same budget, where the paper gives later layers more (unverified: how much). The history is
      one count per slot since the last compression; with m + 1 >= history, the paper's setting, that is the same.

    Args:
      budget: tokens of each key/value head.
      history: last steps that count.
      recent: last tokens that always stay.
      drop: fraction of the budget that is dropped at a time.

    Reference:
      Scissorhands, Liu et al. 2023, arXiv 2305.17118, section 4
    """
    return Method(decode=Scissorhands(budget, history, recent, drop))
