"""Which slots of the body a query reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.contract import LayerState
from kvjax.cache.hold import fused
from kvjax.cache.hold.codecs import Codec
from kvjax.core.attention import NEG, visible, weights
from kvjax.core.types import Array, Block, KvjaxError, Partial


@dataclasses.dataclass(frozen=True)
class Reader:
    """Attends queries to what the codecs k and v hold. This base keeps nothing of its own beside it."""

    lookahead = 0  # guessed tokens that each decode step should carry
    stepwise = False  # whether fresh tokens must come one by one

    def begin(self, block: Block) -> Any:
        """What the reader keeps after a prompt; block [B K S H] with the prompt at the front of each row."""
        return None

    def write(self, aux: Any, fresh: Block, at: Array) -> Any:
        """The same after the tokens [B K T H], now at slots at i32[B] and on."""
        return aux

    def read(
        self,
        k: Codec,
        v: Codec,
        state: LayerState,
        q: Array,
        q_pos: Array,
        window: int | None,
        guessed: Partial | None = None,
    ) -> tuple[Partial, Any]:
        """q [B K G T H] at q_pos i32[B T] -> (the partial over the visible slots, aux).

        guessed: attention to tokens of this call that are not kept, for readers that need a softmax over everything.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Full(Reader):
    """All slots; what lives on the host is brought back whole.

    kernel: how packed codes are read. "xla": a piece at a time, on any device. "pallas": in one kernel, made for NVIDIA
    GPUs (elsewhere interpreted, slowly). "auto": the kernel where there is such a GPU.
    """

    kernel: str = "auto"

    def __post_init__(self):
        if self.kernel not in fused.KERNELS:
            raise KvjaxError(f"kernel must be one of {', '.join(fused.KERNELS)}, got {self.kernel!r}")

    def read(self, k, v, state, q, q_pos, window, guessed=None) -> tuple[Partial, Any]:
        if fused.wanted(self.kernel, k, v):
            return by_query_blocks(lambda q, q_pos: fused.read(k, v, state, q, q_pos, window), q, q_pos, 2), None
        keys, values = k.load(state.k), v.load(state.v)

        def attend(q, q_pos):
            s = jnp.where(visible(state.pos, q_pos, window), k.scores(q, keys), NEG)
            p, m, l = weights(s)
            return Partial(v.mix(p, values), m, l)

        return by_query_blocks(attend, q, q_pos, 512), None


@dataclasses.dataclass(frozen=True)
class TopV(Reader):
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

    def read(self, k, v, state, q, q_pos, window, guessed=None) -> tuple[Partial, Any]:
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

        return by_query_blocks(attend, q, q_pos, 64), None


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
