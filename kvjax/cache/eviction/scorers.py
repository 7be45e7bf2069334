"""How much each prompt token matters, from the keys and the queries that a scorer asks to see."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.protocol import LayerSpec, Replay
from kvjax.core.attention_mass import Observation, attention_mass
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError


class Scores(NamedTuple):
    """One pass of a scorer: what each query head says, and what that makes of a key/value head's tokens."""

    per_query_head: Array  # f32[B K G S], G = 1 for a scorer that sees no queries
    per_kv_head: Array  # f32[B K S]


class Scorer:
    """How much each token of a block matters, rows left-aligned; -inf exactly at empty slots, whatever these hold.

    A scorer is a frozen dataclass with one method, `scores`, and says how many queries it looks at.
    """

    num_queries: int | None = 0  # of a row's last queries: 0 none, W, or None for all of them
    needs_output = False  # whether it looks at the layer's output projection, `Observation.output_projection`
    needs_hidden = False  # whether it looks at the prompt's hidden states, `Observation.hidden_states`
    is_comparable = True  # whether scores of different layers and heads are on one scale, as attention weights are
    # a second pass over the prompt; what `update_scores` makes of it is `Observation.replay_scores` for `scores`
    replay: Replay | None = None

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        """Scores of query heads, and those by which a key/value head chooses; see `head_scores` and `token_scores`."""
        raise NotImplementedError(f"{type(self).__name__} has no method `scores`")

    def update_scores(
        self, block: KVBlock, start: Array, observation: Observation, new: KVBlock, before: Array, spec: LayerSpec
    ) -> Array:
        """f32[B K T]: see `ReplayedLayer.update_scores`; of scorers with a `replay`."""
        raise NotImplementedError

    def require_observation(self, observation: Observation | None) -> Observation:
        """The queries; raises KvjaxError when the caller brought none."""
        if observation is None:
            which = "all" if self.num_queries is None else f"the last {self.num_queries}"
            raise KvjaxError(f"{self} scores by queries, got none; observe {which} of each row")
        return observation


def head_scores(heads: Array, kv: Array, block: KVBlock) -> Scores:
    """Scores from those of query heads f32[B K G S] and of key/value heads f32[B K S]."""
    real = block.pos >= 0
    return Scores(jnp.where(real[:, :, None], heads, -jnp.inf), jnp.where(real, kv, -jnp.inf))


def token_scores(kv: Array, block: KVBlock) -> Scores:
    """Scores from those of key/value heads alone, f32[B K S]."""
    return head_scores(kv[:, :, None], kv, block)


def rank_below_others(scores: Array, which: Array) -> Array:
    """Scores of 0 and more, with those of some tokens below all others and in the same order among themselves."""
    return jnp.where(which, -1.0 / (1.0 + scores), scores)


def window_query_mask(observation: Observation, queries: int) -> Array:
    """bool[B Q]: which of the queries are among a row's last so many."""
    return (observation.pos >= 0) & (observation.pos > observation.pos.max(-1, keepdims=True) - queries)


def pre_window_mask(block: KVBlock, queries: int) -> Array:
    """bool[B 1|K S]: the slots before a row's last so many tokens; rows left-aligned."""
    real = block.pos >= 0
    return jnp.arange(real.shape[-1])[None, None] < real.sum(-1, keepdims=True, dtype=jnp.int32) - queries


def check_kernel(kernel: int) -> None:
    """Raises KvjaxError for a number of neighbours that has no centre."""
    if kernel < 1 or kernel % 2 == 0:
        near = max(1, kernel + 1)
        raise KvjaxError(f"kernel must be odd, so that pooling has a centre, got {kernel}; use {near}")


def pool_scores(x: Array, inside: Array, kernel: int, pool: str) -> Array:
    """x f32[... S] pooled along S over `kernel` neighbours inside bool[... S], with stride 1 (torch's rules).

    "avg" divides by `kernel` at the edges too, "max" ignores what lies beyond them. What is not inside may be anything.
    """
    init, op = (0.0, lax.add) if pool == "avg" else (-np.inf, lax.max)
    shape = (1,) * (x.ndim - 1) + (kernel,)
    found = lax.reduce_window(jnp.where(inside, x, init), np.float32(init), op, shape, (1,) * x.ndim, "SAME")
    return found / kernel if pool == "avg" else found


@dataclasses.dataclass(frozen=True)
class WindowAttention(Scorer):
    """Attention of a row's last `num_queries` prompt queries, pooled along the tokens before them (SnapKV, 2404.14469).

    Mean over the queries (the paper's sum ranks alike). Pooling runs over the tokens before the window only, with
    stride 1: "avg" divides by `kernel` at the edges too, "max" ignores what lies beyond them (torch's rules).
    reduce: mean or max over the query heads of a key/value head, before pooling if reduce_first, else after it.
    The window's own tokens score 1 + their unpooled attention: above every token before them. A row with no more
    tokens than `num_queries` is all window, seen by the queries that it has.
    """

    num_queries: int = 32
    kernel: int = 5
    pool: str = "avg"
    reduce: str = "mean"
    reduce_first: bool = False

    def __post_init__(self):
        if self.num_queries < 1:
            raise KvjaxError(f"queries must be at least 1, got {self.num_queries}; SnapKV uses 32 or 64")
        check_kernel(self.kernel)
        _one_of("pool", self.pool, ("avg", "max"))
        _one_of("reduce", self.reduce, ("mean", "max"))

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        raw = self.received(block, self.require_observation(observation), spec)
        before = pre_window_mask(block, self.num_queries)
        heads = self._pooled(raw, before[:, :, None])
        reduce = jnp.mean if self.reduce == "mean" else jnp.max
        kv = self._pooled(reduce(raw, 2), before) if self.reduce_first else reduce(heads, 2)
        return head_scores(heads, kv, block)

    def received(self, block: KVBlock, observation: Observation, spec: LayerSpec) -> Array:
        """f32[B K G S]: what each slot gets from the window's queries, before any pooling."""
        mine = window_query_mask(observation, self.num_queries).astype(jnp.float32)
        return attention_mass(block, observation, mine / jnp.maximum(mine.sum(-1, keepdims=True), 1.0), spec.window)[0]

    def _pooled(self, x: Array, before: Array) -> Array:
        return jnp.where(before, pool_scores(x, before, self.kernel, self.pool), 1.0 + x)


@dataclasses.dataclass(frozen=True)
class AccumulatedAttention(Scorer):
    """Attention summed over all prompt queries, mean over a key/value head's query heads (H2O, 2306.14048).

    normalise: "visible" divides by the number of queries that can see the token (kvpress' observed attention), "none"
    leaves the sum, which favours old tokens (H2O). decay: a query t places before the row's last one counts
    decay ** t (the forgetting factor of A2SF, 2407.20485), in the sum and in the number.
    """

    num_queries: ClassVar[int | None] = None
    normalise: str = "none"
    decay: float = 1.0

    def __post_init__(self):
        _one_of("normalise", self.normalise, ("none", "visible"))
        if not 0 < self.decay <= 1:
            raise KvjaxError(f"decay must lie in (0, 1], got {self.decay}; 1 forgets nothing")

    def scores(self, block: KVBlock, observation: Observation | None, spec: LayerSpec) -> Scores:
        obs = self.require_observation(observation)
        age = jnp.maximum(obs.pos.max(-1, keepdims=True) - obs.pos, 0).astype(jnp.float32)
        heads, asking = attention_mass(block, obs, jnp.exp(age * np.float32(np.log(self.decay))), spec.window)
        if self.normalise == "visible":
            heads = heads / jnp.maximum(asking, 1e-30)[:, :, None]
        return head_scores(heads, heads.mean(2), block)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise KvjaxError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
