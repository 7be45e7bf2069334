"""Scissorhands: tokens that are often below the mean attention are dropped, many at a time."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.decode.online import (
    Kept,
    admit,
    at_least,
    attend,
    clean,
    need,
    one_by_one,
    ranked,
    select,
)
from kvjax.core.attention import NEG, scores, visible, weights
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block, KvjaxError
from kvjax.models.config import Config


@dataclasses.dataclass(frozen=True)
class Scissorhands:
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
    window: int | None = None  # the layer's sliding window, in the prompt; `plan` sets it
    name: str = dataclasses.field(default="", compare=False)

    lookahead = 0
    restricted = False
    uses_host = False

    def __post_init__(self):
        at_least("Scissorhands", budget=(self.budget, 2), history=(self.history, 1), recent=(self.recent, 1))
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
    def queries(self) -> int:
        """The last queries of the prompt that it looks at."""
        return self.history

    def plan(self, config: Config) -> tuple[Scissorhands, ...]:
        """One method per layer."""
        return tuple(dataclasses.replace(self, window=config.window(i), name="") for i in range(config.layers))

    def kept(self, length: int) -> int:
        """Slots that a prompt of this many tokens takes."""
        return length if length <= self.budget else self.low

    def prefill(self, block: Block, slots: int, obs: Obs | None) -> Kept:
        """The state after a prompt, block [B K T H], seen by the queries obs; its size does not depend on `slots`."""
        n = block.pos.max((1, 2)) + 1
        over = n > self.budget  # [B]

        obs = need(obs, "Scissorhands", f"the last {self.history} queries")
        counts = over[:, None] | (obs.pos > self.budget - self.history)
        counts &= obs.pos >= jnp.maximum(n - self.history, 0)[:, None]
        count = below_mean(block, obs, counts, self.window)
        pos = jnp.broadcast_to(block.pos, count.shape)
        n, over = n[:, None, None], over[:, None, None]
        rank = jnp.where(pos > n - 1 - self.recent, 0, -count)
        state = select(block, count, rank, self.budget, self.budget + 1)
        drop = over & (jnp.arange(self.budget + 1)[None, None] >= self.low)  # slots come in the order of rank
        return dataclasses.replace(state, pos=jnp.where(drop, -1, state.pos), score=jnp.where(over, 0, state.score))

    def extend(
        self, state: Kept, q: Array, k: Array, v: Array, q_pos: Array, commit: int, window: int | None = None
    ) -> tuple[Array, Kept]:
        """Attends T fresh tokens, one after the other, and keeps the first `commit` of them.

        q [B K G T H]; k, v [B K T H]; q_pos i32[B T], -1 for padding on the right. Returns out f32[B K G T H].
        """
        step = lambda state, q, fresh: self._step(state, q, fresh, window)  # noqa: E731
        return one_by_one(step, state, q, clean(Block(k, v, q_pos[:, None])), commit)

    def _step(self, state: Kept, q: Array, fresh: Block, window: int | None) -> tuple[Array, Kept]:
        t, real = fresh.pos, fresh.pos >= 0  # [B 1 1]
        state = admit(state, fresh)
        out, p = attend(state, q, t[:, 0], window)
        seen = visible(state.pos, t[:, 0], window)[:, :, 0, 0]
        mean = 1 / jnp.maximum(seen.sum(2, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        left = (state.pos < 0).sum(2, keepdims=True, dtype=jnp.int32)[:, :1]  # steps until the compression
        counts = real & (left < self.history) & seen & (p.mean(2) < mean)
        count, due = state.score + counts.astype(jnp.int32), real & (left == 0)
        pos, count = lax.cond(due.any(), self._compress, lambda pos, count, *_: (pos, count), state.pos, count, t, due)
        return out, dataclasses.replace(state, pos=pos, score=count)

    def _compress(self, pos: Array, count: Array, t: Array, due: Array) -> tuple[Array, Array]:
        """Of rows that are due, all but `low` slots of each head are emptied."""
        order = ranked(jnp.where(pos > t - self.recent, 0, -count), pos)
        place = jax.vmap(jax.vmap(lambda o: jnp.zeros_like(o).at[o].set(jnp.arange(o.size, dtype=o.dtype))))(order)
        return jnp.where(due & (place >= self.low), -1, pos), jnp.where(due, 0, count)


def below_mean(block: Block, obs: Obs, counts: Array, window: int | None, at_once: int = 16) -> Array:
    """How many of the queries with counts bool[B Q] give a slot less than the mean weight, i32[B K S].

    Full causal softmax over the prompt, the mean over its query heads; memory grows with at_once x S, never Q x S.
    """
    Q = obs.pos.shape[1]
    blocks = -(-Q // at_once)
    grow = [(0, blocks * at_once - Q)]
    q = jnp.pad(obs.q, [(0, 0)] * 3 + grow + [(0, 0)])
    t = jnp.pad(jnp.where(counts, obs.pos, -1), [(0, 0), *grow], constant_values=-1)

    def add(total, i):
        qi, ti = (lax.dynamic_slice_in_dim(x, i * at_once, at_once, a) for x, a in ((q, 3), (t, 1)))
        seen = visible(block.pos, ti, window)
        p, _, l = weights(jnp.where(seen, scores(qi, block.k), NEG))
        p = (p / jnp.maximum(l, 1e-30)[..., None]).mean(2)
        seen = seen[:, :, 0]  # [B K|1 q S]
        mean = 1 / jnp.maximum(seen.sum(-1, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        return total + (seen & (p < mean)).sum(2, dtype=jnp.int32), None

    zero = jnp.zeros(block.k.shape[:3], jnp.int32)
    return lax.scan(add, zero, jnp.arange(blocks, dtype=jnp.int32))[0]
