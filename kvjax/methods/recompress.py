"""Compressing again while decoding: whenever so many tokens have come, a layer goes back to its budget."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvjax.cache.contract import LayerState
from kvjax.core import memory
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block, IncompatibleMethod


def check(method) -> None:
    """Raises IncompatibleMethod for slots that cannot be compressed again."""
    if not method.select:
        raise IncompatibleMethod(
            f"again={method.again} compresses an eviction method's tokens again and finds none; compose it with one, "
            "as in 'snapkv:budget=256 + recompress:every=128'"
        )
    if method.select.scorer.queries is None:
        raise IncompatibleMethod(
            f"{method.select.scorer} needs every query since the start and cannot score again; use `h2o`, which keeps "
            "count while decoding, or a scorer with a window"
        )
    if method.k.stepwise or method.v.stepwise or method.uses_host or method.read.stepwise:
        raise IncompatibleMethod(
            "compressing again would quantise rows twice, or move all rows between host and device; use it with plain "
            "rows on the device"
        )
    if method.select.target > 2**24:
        raise IncompatibleMethod(f"{method.select.budget} grows with the text; give a budget in tokens")


def begin(obs: Obs | None) -> Obs | None:
    """The queries that the scorer looks at, each in place position modulo W, from then on kept up to date."""
    if obs is None:
        return None
    W = obs.pos.shape[1]  # consecutive positions, the row's last ones: a rotation puts each in its place
    shift = (obs.pos[:, -1:] + 1) % W
    at = (jnp.arange(W, dtype=jnp.int32)[None] - shift) % W
    q = jnp.take_along_axis(obs.q, at[:, None, None, :, None], 3)
    return Obs(q, jnp.take_along_axis(obs.pos, at, 1))


def see(state: LayerState, q: Array, q_pos: Array) -> LayerState:
    """Takes in the query q [B K G 1 H] at q_pos i32[B 1], where that is a token."""
    if state.seen is None:
        return state
    B, K, G, W, H = state.seen.q.shape
    at = jnp.where(q_pos[:, 0] >= 0, q_pos[:, 0] % W, W)
    new = memory.put(state.seen.q.reshape(B, K * G, W, H), q.reshape(B, K * G, 1, H), at)
    pos = memory.put(state.seen.pos[:, None], q_pos[:, None], at)[:, 0]
    return dataclasses.replace(state, seen=Obs(new.reshape(state.seen.q.shape), pos))


def compress(method, state: LayerState) -> LayerState:
    """Rows without a free slot go back to their budget; the others stay as they are."""
    due = state.n >= state.pos.shape[2]
    return lax.cond(due.any(), lambda s: _compress(method, s, due), lambda s: s, state)


def _compress(method, state: LayerState, due: Array) -> LayerState:
    S = state.pos.shape[2]
    keep = jnp.where(due, method.select.target, state.n)
    block = Block(method.k.decode(state.k), method.v.decode(state.v), state.pos)
    block = method.select.choose(block, state.seen, keep, S, method.rest)
    pos = jnp.broadcast_to(block.pos, state.pos.shape)
    fresh = (method.k.encode(block.k, pos), method.v.encode(block.v, pos))
    n = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32)
    return dataclasses.replace(state, k=fresh[0], v=fresh[1], pos=pos, n=n)
