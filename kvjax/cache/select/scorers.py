"""How much each prompt token matters, from the keys and the queries that a scorer asks to see."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.core.observe import Obs, mass
from kvjax.core.types import Array, Block, KvjaxError


class Scores(NamedTuple):
    """One pass of a scorer: what each query head says, and what that makes of a key/value head's tokens."""

    heads: Array  # f32[B K G S], G = 1 for a scorer that sees no queries
    kv: Array  # f32[B K S]


class Scorer(Protocol):
    """Scores the tokens of a block, rows left-aligned; -inf exactly at empty slots, whatever these hold."""

    queries: int | None  # how many of a row's last queries it looks at: 0 none, W, or None for all of them

    def score(self, block: Block, obs: Obs | None, window: int | None) -> Array:
        """f32[B K S]; `window` is the layer's sliding window, as in attention.visible."""

    def score_both(self, block: Block, obs: Obs | None, window: int | None) -> Scores:
        """The scores of each query head, and those of `score`, from one pass."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Attention of a row's last `queries` prompt queries, pooled along the tokens before them (SnapKV, 2404.14469).

    Mean over the queries (the paper's sum ranks alike). Pooling runs over the tokens before the window only, with
    stride 1: "avg" divides by `kernel` at the edges too, "max" ignores what lies beyond them (torch's rules).
    reduce: mean or max over the query heads of a key/value head, before pooling if reduce_first, else after it.
    The window's own tokens score 1 + their unpooled attention: above every token before them. A row with no more
    tokens than `queries` is all window, seen by the queries that it has.
    """

    queries: int = 32
    kernel: int = 5
    pool: str = "avg"
    reduce: str = "mean"
    reduce_first: bool = False

    def __post_init__(self):
        if self.queries < 1:
            raise KvjaxError(f"queries must be at least 1, got {self.queries}; SnapKV uses 32 or 64")
        if self.kernel < 1 or self.kernel % 2 == 0:
            near = max(1, self.kernel + 1)
            raise KvjaxError(f"kernel must be odd, so that pooling has a centre, got {self.kernel}; use {near}")
        _one_of("pool", self.pool, ("avg", "max"))
        _one_of("reduce", self.reduce, ("mean", "max"))

    def score(self, block: Block, obs: Obs | None, window: int | None) -> Array:
        return self.score_both(block, obs, window).kv

    def score_both(self, block: Block, obs: Obs | None, window: int | None) -> Scores:
        obs = _needed(obs, self)
        mine = ((obs.pos >= 0) & (obs.pos > obs.pos.max(-1, keepdims=True) - self.queries)).astype(jnp.float32)
        raw, _ = mass(block, obs, mine / jnp.maximum(mine.sum(-1, keepdims=True), 1.0), window)
        real = block.pos >= 0
        before = jnp.arange(real.shape[-1])[None, None] < real.sum(-1, keepdims=True, dtype=jnp.int32) - self.queries
        heads = self._pooled(raw, before[:, :, None])
        reduce = jnp.mean if self.reduce == "mean" else jnp.max
        kv = self._pooled(reduce(raw, 2), before) if self.reduce_first else reduce(heads, 2)
        return _masked(heads, kv, real)

    def _pooled(self, x: Array, before: Array) -> Array:
        init, op = (0.0, lax.add) if self.pool == "avg" else (-np.inf, lax.max)
        shape = (1,) * (x.ndim - 1) + (self.kernel,)
        pooled = lax.reduce_window(jnp.where(before, x, init), np.float32(init), op, shape, (1,) * x.ndim, "SAME")
        return jnp.where(before, pooled / self.kernel if self.pool == "avg" else pooled, 1.0 + x)


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """Attention summed over all prompt queries, mean over a key/value head's query heads (H2O, 2306.14048).

    normalise: "visible" divides by the number of queries that can see the token (kvpress' observed attention), "none"
    leaves the sum, which favours old tokens (H2O). decay: a query t places before the row's last one counts
    decay ** t (the forgetting factor of A2SF, 2407.20485), in the sum and in the number.
    """

    queries: ClassVar[int | None] = None
    normalise: str = "none"
    decay: float = 1.0

    def __post_init__(self):
        _one_of("normalise", self.normalise, ("none", "visible"))
        if not 0 < self.decay <= 1:
            raise KvjaxError(f"decay must lie in (0, 1], got {self.decay}; 1 forgets nothing")

    def score(self, block: Block, obs: Obs | None, window: int | None) -> Array:
        return self.score_both(block, obs, window).kv

    def score_both(self, block: Block, obs: Obs | None, window: int | None) -> Scores:
        obs = _needed(obs, self)
        age = jnp.maximum(obs.pos.max(-1, keepdims=True) - obs.pos, 0).astype(jnp.float32)
        heads, seen = mass(block, obs, jnp.exp(age * np.float32(np.log(self.decay))), window)
        if self.normalise == "visible":
            heads = heads / jnp.maximum(seen, 1e-30)[:, :, None]
        return _masked(heads, heads.mean(2), block.pos >= 0)


@dataclasses.dataclass(frozen=True)
class KeyNorm:
    """Tokens with small keys matter: minus the key's norm (Devoto et al. 2024, arXiv 2406.11430)."""

    queries: ClassVar[int | None] = 0

    def score(self, block: Block, obs: Obs | None = None, window: int | None = None) -> Array:
        return self.score_both(block, obs, window).kv

    def score_both(self, block: Block, obs: Obs | None = None, window: int | None = None) -> Scores:
        kv = -jnp.sqrt(jnp.square(block.k.astype(jnp.float32)).sum(-1))
        return _masked(kv[:, :, None], kv, block.pos >= 0)


@dataclasses.dataclass(frozen=True)
class Random:
    """Uniform in [0, 1) by (seed, key/value head, position) alone: the baseline. All layers draw alike."""

    queries: ClassVar[int | None] = 0
    seed: int = 0

    def score(self, block: Block, obs: Obs | None = None, window: int | None = None) -> Array:
        return self.score_both(block, obs, window).kv

    def score_both(self, block: Block, obs: Obs | None = None, window: int | None = None) -> Scores:
        pos = jnp.broadcast_to(block.pos, block.k.shape[:3])
        head = jnp.arange(pos.shape[1], dtype=jnp.int32)[None, :, None]
        bits = draw(self.seed, jnp.broadcast_to(head, pos.shape), pos) >> 8
        kv = bits.astype(jnp.float32) * np.float32(2**-24)
        return _masked(kv[:, :, None], kv, block.pos >= 0)


def draw(seed: int, *index: Array) -> Array:
    """Random uint32 of the indices' shape; each depends on the seed and its own indices, and on nothing else.

    A chain of hashes (MurmurHash3's finaliser): for given first indices, different last ones never draw alike.
    """
    x = jnp.full(index[0].shape, np.uint32(seed % 2**32))
    for i in index:
        x = _hash(_hash(x) ^ i.astype(jnp.uint32))
    return x


def _hash(x: Array) -> Array:
    x = (x + np.uint32(0x9E3779B9)).astype(jnp.uint32)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _masked(heads: Array, kv: Array, real: Array) -> Scores:
    return Scores(jnp.where(real[:, :, None], heads, -jnp.inf), jnp.where(real, kv, -jnp.inf))


def _needed(obs: Obs | None, scorer: Scorer) -> Obs:
    if obs is None:
        which = "all" if scorer.queries is None else f"the last {scorer.queries}"
        raise KvjaxError(f"{scorer} scores by queries, got none; observe {which} of each row")
    return obs


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise KvjaxError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
