"""A layer under a method, driven by given queries, keys and values."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.kv import LayerState, Method
from kvjax.types import Block

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


def prefill(method: Method, d: Data, padding: float = 0.0, capacity: int = CAPACITY) -> LayerState:
    """The state after the prompts; beyond each prompt the block holds `padding`."""
    T = int(d.lengths.max())
    pos = np.arange(T)[None] < d.lengths[:, None]
    keep = jnp.asarray(pos)[:, None, :, None]
    k, v = (jnp.where(keep, x[:, :, :T], jnp.asarray(padding, x.dtype)) for x in (d.k, d.v))
    pos = jnp.asarray(np.where(pos, np.arange(T)[None], -1), jnp.int32)[:, None]
    return jax.jit(lambda k, v, p: method.prefill(Block(k, v, p), capacity))(k, v, pos)


def step(method: Method, window: int | None = None):
    """extend for one committed token, as a function of (state, fresh token)."""
    return lambda state, fresh: method.extend(state, *fresh, 1, window)


def run(method: Method, d: Data, window: int | None = None, state: LayerState | None = None) -> np.ndarray:
    """All decode steps one by one -> f32[B K G STEPS H]."""
    state = prefill(method, d) if state is None else state
    f = jax.jit(step(method, window))
    outs = []
    for t in range(STEPS):
        out, state = f(state, d.token(t))
        outs.append(out)
    return np.concatenate(outs, 3)
