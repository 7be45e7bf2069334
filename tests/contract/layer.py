"""A layer under a method, driven by given queries, keys and values."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.observe import Obs
from kvjax.core.types import Block
from kvjax.models import Config

B, K, G, H = 3, 2, 2, 32
LENGTHS = np.array([9, 1, 6], np.int32)  # ragged prompts, one of a single token
STEPS = 7
TOTAL = LENGTHS + STEPS
CAPACITY = 24


@dataclasses.dataclass(frozen=True)
class Data:
    """Per row b, token t: q [B K G S H], k, v [B K S H], left-aligned; beyond a row's end lies `padding`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    lengths: np.ndarray

    def token(self, step: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """What `extend` takes for one fresh token of each row."""
        return self.tokens(step, 1)

    def tokens(self, step: int, count: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """What `extend` takes for `count` fresh tokens of each row."""
        pos = jnp.asarray(self.lengths[:, None] + step + np.arange(count)[None], jnp.int32)
        take = lambda x: jnp.take_along_axis(x, pos.reshape(B_of(x), *(1,) * (x.ndim - 3), -1, 1), -2)  # noqa: E731
        return take(self.q), take(self.k), take(self.v), pos


def B_of(x: jax.Array) -> int:  # noqa: N802 (the glossary's letter)
    return x.shape[0]


def data(seed: int = 0, padding: float = 0.0, dtype=jnp.float32) -> Data:
    """Random rows; everything beyond a row's last token is `padding`."""
    rng = np.random.default_rng(seed)
    S = int(TOTAL.max())
    real = np.arange(S)[None] < TOTAL[:, None]
    fill = lambda x, m: jnp.asarray(np.where(m, x, padding), dtype)  # noqa: E731
    q = fill(rng.normal(size=(B, K, G, S, H)) * 2, real[:, None, None, :, None])
    k, v = (fill(rng.normal(size=(B, K, S, H)), real[:, None, :, None]) for _ in range(2))
    return Data(q, k, v, LENGTHS)


def rows(d: Data, b: int) -> Data:
    """Row b alone."""
    return Data(d.q[b : b + 1], d.k[b : b + 1], d.v[b : b + 1], d.lengths[b : b + 1])


CONFIG = Config(vocab_size=2, width=8, layers=1, heads=K * G, kv_heads=K, head_dim=H, mlp_width=8)


def bound(method: Any) -> Any:
    """The method of the only layer of a model."""
    return method.plan(CONFIG)[0]


def slots(method: Any, lengths: np.ndarray, capacity: int = CAPACITY) -> int:
    """What a prefill has to make room for, so that the longest row can grow to `capacity` tokens."""
    return max(bound(method).kept(int(n)) for n in lengths) + capacity - int(LENGTHS.max())


def prefill(method: Any, d: Data, padding: float = 0.0, capacity: int = CAPACITY) -> Any:
    """The state after the prompts; beyond each prompt the block holds `padding`."""
    method, n = bound(method), slots(method, d.lengths, capacity)
    T = int(d.lengths.max())
    pos = np.arange(T)[None] < d.lengths[:, None]
    keep = jnp.asarray(pos)[:, None, :, None]
    k, v = (jnp.where(keep, x[:, :, :T], jnp.asarray(padding, x.dtype)) for x in (d.k, d.v))
    q = jnp.where(keep[:, :, None], d.q[:, :, :, :T], jnp.asarray(padding, d.q.dtype))
    pos = jnp.asarray(np.where(pos, np.arange(T)[None], -1), jnp.int32)
    if method.restricted:
        empty = method.empty(B_of(k), n, k.dtype)
        return jax.jit(lambda s, *x: method.extend(s, *x, T)[1])(empty, q, k, v, pos)
    return jax.jit(lambda q, k, v, p: method.prefill(Block(k, v, p[:, None]), n, shown(method, q, p)))(q, k, v, pos)


def shown(method: Any, q: jax.Array, pos: jax.Array) -> Obs | None:
    """The queries [B K G T H] that the method wants to see."""
    if method.queries == 0:
        return None
    if method.queries is None:
        return Obs(q, pos)
    at = pos.max(1, keepdims=True) + 1 - method.queries + jnp.arange(method.queries, dtype=jnp.int32)[None]
    q = jnp.take_along_axis(q, jnp.maximum(at, 0)[:, None, None, :, None], 3)
    return Obs(q, jnp.maximum(at, -1))


def extend(method: Any, commit: int = 1, window: int | None = None):
    """extend as a function of (state, fresh tokens)."""
    method = bound(method)
    return lambda state, fresh: method.extend(state, *fresh, commit, window)


def run(method: Any, d: Data, window: int | None = None, state: Any = None) -> np.ndarray:
    """All decode steps one by one -> f32[B K G STEPS H]."""
    state = prefill(method, d) if state is None else state
    f = jax.jit(extend(method, window=window))
    outs = []
    for t in range(STEPS):
        out, state = f(state, d.token(t))
        outs.append(out)
    return np.concatenate(outs, 3)
