"""H2O: while decoding, the token with the least accumulated attention makes room for the newest."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from kvjax.cache.decode.online import Kept, admit, at_least, attend, clean, need, one_by_one, select
from kvjax.core.observe import Obs, mass
from kvjax.core.types import Array, Block, KvjaxError
from kvjax.models.config import Config


@dataclasses.dataclass(frozen=True)
class H2O:
    """Heavy hitters and recent tokens, chosen again at every step (Zhang et al. 2023, arXiv 2306.14048, section 4).

    A token's score is the attention it has received, softmax over what is kept, summed over the query heads of its
    key/value head; the prompt's queries seed it, in full causal attention. A step attends to all of the
    heavy + recent tokens and to itself, adds its attention, and then, over budget, evicts for good the lowest score
    that is not among the last `recent` (the newest included); of equal scores the older goes. So there is one
    slot more, where the newest token goes before anything leaves. A longer prompt is cut in one go: the best `heavy` of
    all but the last `recent`.

    decay: every step first multiplies all scores by it (A2SF; 1: H2O; 0: the last query alone, like TOVA). normalise:
    "none" (the paper; favours old tokens), or "visible-count", the score over the number of queries that could see
    the token. granularity: "kv", each key/value head has its own tokens (the paper, without grouped heads), or
    "layer", the mean over them chooses for all. True positions stay (the paper's streaming variant re-indexes them).

    Other algorithms of this name: the authors' simulation masks and drops nothing, and hides one token for a step;
    their `real_drop` is this one without grouped heads; KVCache-Factory and kvpress prune the prompt only.
    """

    heavy: int
    recent: int
    decay: float = 1.0
    normalise: str = "none"
    granularity: str = "kv"
    window: int | None = None  # the layer's sliding window, in the prompt; `plan` sets it
    name: str = dataclasses.field(default="", compare=False)

    queries = None  # all of the prompt's
    lookahead = 0
    restricted = False
    uses_host = False

    def __post_init__(self):
        at_least("H2O", heavy=(self.heavy, 0), recent=(self.recent, 1))
        if not 0 <= self.decay <= 1:
            raise KvjaxError(f"decay of H2O must be between 0 and 1, got {self.decay}; 1 forgets nothing")
        if self.normalise not in ("none", "visible-count"):
            raise KvjaxError(f"normalise of H2O must be 'none' or 'visible-count', got {self.normalise!r}")
        if self.granularity not in ("kv", "layer"):
            raise KvjaxError(f"granularity of H2O must be 'kv' or 'layer', got {self.granularity!r}")

    @property
    def budget(self) -> int:
        """Tokens kept per key/value head."""
        return self.heavy + self.recent

    def plan(self, config: Config) -> tuple[H2O, ...]:
        """One method per layer."""
        return tuple(dataclasses.replace(self, window=config.window(i), name="") for i in range(config.layers))

    def kept(self, length: int) -> int:
        """Slots that a prompt of this many tokens takes."""
        return min(length, self.budget)

    def prefill(self, block: Block, slots: int, obs: Obs | None) -> Kept:
        """The state after a prompt, block [B K T H], seen by the queries obs; its size does not depend on `slots`."""
        obs = need(obs, "H2O", "all queries")
        last = block.pos.max((1, 2))[:, None]  # [B 1]
        age = jnp.where(obs.pos < 0, 0, last - obs.pos).astype(jnp.float32)
        score = self._share(mass(block, obs, jnp.float32(self.decay) ** age, self.window)[0].sum(2))
        pos = jnp.broadcast_to(block.pos, score.shape)
        protected = pos > last[..., None] - self.recent
        rank = jnp.where(protected, jnp.inf, self._rank(score, pos, last[..., None]))
        return select(block, score, rank, self.budget, self.budget + 1)

    def extend(
        self, state: Kept, q: Array, k: Array, v: Array, q_pos: Array, commit: int, window: int | None = None
    ) -> tuple[Array, Kept]:
        """Attends T fresh tokens, one after the other, and keeps the first `commit` of them.

        q [B K G T H]; k, v [B K T H]; q_pos i32[B T], -1 for padding on the right. Returns out f32[B K G T H].
        """
        step = lambda state, q, fresh: self._step(state, q, fresh, window)  # noqa: E731
        return one_by_one(step, state, q, clean(Block(k, v, q_pos[:, None])), commit)

    def _step(self, state: Kept, q: Array, fresh: Block, window: int | None) -> tuple[Array, Kept]:
        t = fresh.pos  # [B 1 1]
        state = admit(state, fresh)
        out, p = attend(state, q, t[:, 0], window)
        score = jnp.where(t >= 0, self.decay * state.score + self._share(p.sum(2)), state.score)
        old = (state.pos >= 0) & (state.pos <= t - self.recent)
        rank = jnp.where(old, self._rank(score, state.pos, t), jnp.inf)
        lowest = old & (rank == rank.min(2, keepdims=True))
        first = jnp.where(lowest, state.pos, jnp.iinfo(jnp.int32).max).min(2, keepdims=True)
        full = (state.pos >= 0).all(2, keepdims=True) & (t >= 0)
        pos = jnp.where(full & lowest & (state.pos == first), -1, state.pos)
        return out, dataclasses.replace(state, pos=pos, score=score)

    def _share(self, received: Array) -> Array:
        """Attention received, f32[B K S], as the heads choose by it."""
        if self.granularity == "kv":
            return received
        return jnp.broadcast_to(received.mean(1, keepdims=True), received.shape)

    def _rank(self, score: Array, pos: Array, t: Array) -> Array:
        """score f32[B K S] of tokens at pos, at time t i32[B 1 1] -> what they are compared by."""
        if self.normalise == "none":
            return score
        seen = t - pos + 1
        seen = seen if self.window is None else jnp.minimum(seen, self.window)
        return score / jnp.maximum(seen, 1).astype(jnp.float32)
