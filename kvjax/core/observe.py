"""What a prompt's queries say about its keys: the observation a scorer asks for, and blockwise passes over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.attention import NEG, scores, visible, weights
from kvjax.core.types import Array, Block


class Obs(NamedTuple):
    """The last Q prompt queries of each row, after RoPE; only `pos` tells which of them are real."""

    q: Array  # [B K G Q H]
    pos: Array  # i32[B Q], positions in the prompt, -1 = padding
    keep: Array | None = None  # i32[B], tokens of each row that stay, where that was measured over all layers
    output: Array | None = None  # [1 K G H D], the layer's output projection, where it is asked for
    hidden: Array | None = None  # [B 1 Q D], what these queries, and their keys and values, are made of, likewise
    probed: Array | None = None  # f32[B K S], what a second pass over the prompt said of its tokens, likewise
    neighbour: Block | None = None  # the same prompt in the layer above or below, likewise


def mass(
    block: Block,
    obs: Obs,
    by: Array,
    window: int | None = None,
    queries_at_once: int = 64,
    change: Callable[[Array, Array], Array] | None = None,
) -> tuple[Array, Array]:
    """The attention that each slot receives: float32 softmax weights, summed over queries that count `by` f32[B Q].

    Causal, inside the layer's sliding window. Returns the sum f32[B K G S], and the sum of `by` over the queries
    that see the slot f32[B 1|K S]. Padding queries see nothing and empty slots receive 0, whatever they hold. Memory
    grows with `queries_at_once` x S, never with Q x S. change: what becomes, before the softmax, of the logits
    f32[B K G Q S] of some queries at i32[B Q].
    """
    B, K, G = obs.q.shape[:3]

    def add(total, xs):
        q, pos, by = xs
        by = by[:, None, None, :, None]
        seen = visible(block.pos, pos, window)
        logits = scores(q, block.k) if change is None else change(scores(q, block.k), pos)
        p, _, l = weights(jnp.where(seen, logits, NEG))
        received = (p * (by / jnp.maximum(l, 1e-30)[..., None])).sum(3)
        return (total[0] + received, total[1] + jnp.where(seen, by, 0.0).sum(3)[:, :, 0]), None

    zero = (jnp.zeros((B, K, G, block.k.shape[2])), jnp.zeros(block.pos.shape))
    return lax.scan(add, zero, _in_blocks(obs, by, queries_at_once))[0]


class Moments(NamedTuple):
    """Sums over queries of the attention p that each slot receives from them, f32[B K G S]."""

    p: Array
    square: Array  # of p * p
    p_log_p: Array  # of p * ln(p + 1e-10)


def moments(block: Block, obs: Obs, window: int | None = None, queries_at_once: int = 64) -> Moments:
    """The sums from which mean, variance and entropy of the attention to each slot follow, over all real queries.

    Causal, inside the layer's sliding window; padding and memory as in `mass`.
    """
    B, K, G = obs.q.shape[:3]

    def add(total, xs):
        q, pos, _ = xs
        p, _, l = weights(jnp.where(visible(block.pos, pos, window), scores(q, block.k), NEG))
        p = p / jnp.maximum(l, 1e-30)[..., None]
        new = Moments(p.sum(3), (p * p).sum(3), (p * jnp.log(p + 1e-10)).sum(3))
        return jax.tree.map(jnp.add, total, new), None

    zero = jnp.zeros((B, K, G, block.k.shape[2]))
    xs = _in_blocks(obs, jnp.ones(obs.pos.shape), queries_at_once)
    return lax.scan(add, Moments(zero, zero, zero), xs)[0]


def _in_blocks(obs: Obs, by: Array, most: int) -> tuple[Array, Array, Array]:
    """Queries, their positions and what they count, in n blocks of at most so many: n comes first."""
    B, K, G, Q, H = obs.q.shape
    size = min(most, Q)
    blocks, pad = -(-Q // size), -Q % size
    q = jnp.pad(obs.q, [(0, 0)] * 3 + [(0, pad), (0, 0)]).reshape(B, K, G, blocks, size, H)
    pos = jnp.pad(obs.pos, [(0, 0), (0, pad)], constant_values=-1).reshape(B, blocks, size)
    by = jnp.pad(by, [(0, 0), (0, pad)]).reshape(B, blocks, size)
    return jnp.moveaxis(q, 3, 0), jnp.moveaxis(pos, 1, 0), jnp.moveaxis(by, 1, 0)
