"""Which slots of the body a query reads."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.attention import NEG, visible, weights
from kvjax.kv.codecs import Codec
from kvjax.kv.state import LayerState
from kvjax.types import Array, KvjaxError, Partial


class Reader(Protocol):
    """Attends q [B K G T H] at q_pos i32[B T] to the body of a layer state, held by the codecs k and v."""

    def read(self, k: Codec, v: Codec, state: LayerState, q: Array, q_pos: Array, window: int | None) -> Partial:
        """The partial over the body's visible slots."""


@dataclasses.dataclass(frozen=True)
class Full:
    """All slots; what lives on the host is brought back whole."""

    def read(self, k: Codec, v: Codec, state: LayerState, q: Array, q_pos: Array, window: int | None) -> Partial:
        keys, values = k.load(state.k), v.load(state.v)

        def attend(q, q_pos):
            s = jnp.where(visible(state.pos, q_pos, window), k.scores(q, keys), NEG)
            p, m, l = weights(s)
            return Partial(v.mix(p, values), m, l)

        return by_query_blocks(attend, q, q_pos, 512)


@dataclasses.dataclass(frozen=True)
class TopV:
    """Exact softmax over all keys, then only the values of the n heaviest slots (KCache, section 3.1).

    granularity: "query", one set per query head (the paper); "kv", one set per key/value head, by the weight
    summed over its query heads. renormalise: divide by the weight of the chosen slots instead of all of them
    (the paper's formula does not: the output shrinks by the mass left out).
    """

    n: int
    renormalise: bool = False
    granularity: str = "query"

    def __post_init__(self):
        if self.n < 1:
            raise KvjaxError(f"n must be at least 1 value per head, got {self.n}; the paper uses 32, 64 or 128")
        if self.granularity not in ("query", "kv"):
            raise KvjaxError(f"granularity must be 'query' or 'kv', got {self.granularity!r}")

    def read(self, k: Codec, v: Codec, state: LayerState, q: Array, q_pos: Array, window: int | None) -> Partial:
        keys = k.load(state.k)

        def attend(q, q_pos):
            B, K, G, T, H = q.shape
            s = jnp.where(visible(state.pos, q_pos, window), k.scores(q, keys), NEG)
            p, m, l = weights(s)
            n = min(self.n, p.shape[-1])
            by = p if self.granularity == "query" else (p / jnp.maximum(l, 1e-30)[..., None]).sum(2, keepdims=True)
            idx = lax.top_k(by, n)[1]  # [B K G|1 T n]
            values = v.rows(state.v, idx.reshape(B, K, -1)).reshape(*idx.shape, H)
            p = jnp.take_along_axis(p, jnp.broadcast_to(idx, (B, K, G, T, n)), -1)
            o = jnp.einsum("bkgtn,bkgtnh->bkgth", p, jnp.broadcast_to(values, (B, K, G, T, n, H)).astype(jnp.float32))
            return Partial(o, m, p.sum(-1) if self.renormalise else l)

        return by_query_blocks(attend, q, q_pos, 64)


def by_query_blocks(attend, q: Array, q_pos: Array, n: int) -> Partial:
    """attend(q, q_pos) -> Partial, n queries at a time, so that a long chunk needs no T x S array."""
    T = q.shape[3]
    if T <= n:
        return attend(q, q_pos)
    pad = -T % n
    q = jnp.pad(q, [(0, 0)] * 3 + [(0, pad), (0, 0)])
    q_pos = jnp.pad(q_pos, [(0, 0), (0, pad)], constant_values=-1)
    split = lambda x, axis: jnp.moveaxis(x.reshape(*x.shape[:axis], -1, n, *x.shape[axis + 1 :]), axis, 0)  # noqa: E731
    parts = lax.map(lambda xs: attend(*xs), (split(q, 3), split(q_pos, 1)))
    join = lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, *x.shape[5:])[:, :, :, :T]  # noqa: E731
    return jax.tree.map(join, parts)
