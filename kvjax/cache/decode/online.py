"""What policies that evict while decoding share: slots written in place, one step at a time, RoPE undone.

The order of slots means nothing here: `pos` says which token is where, and -1 that a slot is empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core import memory
from kvjax.core.attention import NEG, mix, scores, visible, weights
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block, KvjaxError, pytree
from kvjax.models.config import Config
from kvjax.models.layers import rope_angles, rotate


@pytree
class Kept:
    """The tokens of one layer that are still there, in slots, on the device."""

    k: memory.Buffer  # [B K S H]
    v: memory.Buffer  # [B K S H]
    pos: Array  # i32[B 1|K S]
    score: Array | None = None  # [B K S], what the policy counts per slot


def at_least(method: str, **fields: tuple[int, int]) -> None:
    """Raises KvjaxError unless each field, given as (value, least), is at least `least`."""
    for name, (value, least) in fields.items():
        if value < least:
            raise KvjaxError(f"{name} of {method} must be at least {least}, got {value}; use {name}={least} or more")


def clean(block: Block) -> Block:
    """The block with zeros in its empty slots, whatever they held."""
    full = (block.pos >= 0)[..., None]
    return Block(*(jnp.where(full, x, jnp.zeros((), x.dtype)) for x in (block.k, block.v)), block.pos)


def turn(x: Array, config: Config, pos: Array, back: bool = False) -> Array:
    """x [B K S H] with RoPE for positions i32[B S] applied, or undone; computed and returned in float32."""
    cos, sin = (a[:, None] for a in rope_angles(config, jnp.maximum(pos, 0)))
    return rotate(x.astype(jnp.float32), cos, -sin if back else sin)


def turn_queries(q: Array, config: Config, pos: Array, back: bool = False) -> Array:
    """`turn` for q [B K G T H] at i32[B T]."""
    B, K, G, T, H = q.shape
    return turn(q.reshape(B, K * G, T, H), config, pos, back).reshape(q.shape)


def put_at(data: Array, x: Array, slot: Array) -> Array:
    """data [B K S ...] with x [B K T ...] at slots i32[B 1|K T], no two of a row alike; those outside are dropped."""
    B, K, S = data.shape[:3]
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.where(slot < 0, S, slot))
    return data.at[index].set(x, mode="drop", unique_indices=True)


def put_rows(buf: memory.Buffer, x: Array, slot: Array) -> memory.Buffer:
    """`put_at` for a buffer on the device and rows x [B K T W] in its own dtype."""
    return dataclasses.replace(buf, data=put_at(buf.data, memory.pack(x).data, slot))


def gather(x: Array, idx: Array) -> Array:
    """x [B K S ...] at idx i32[B K n] -> [B K n ...]."""
    return jnp.take_along_axis(x, jnp.expand_dims(idx, range(3, x.ndim)), 2)


def ranked(score: Array, pos: Array) -> Array:
    """Slots i32[B K S] from the highest score to the lowest; the newer token first among equals, empty slots last."""
    S = pos.shape[2]
    slot = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[None, None], pos.shape)
    return lax.sort(((pos < 0).astype(jnp.int32), -score, -pos, slot), dimension=2, num_keys=3)[3]


def select(block: Block, score: Array, rank: Array, count: int, slots: int) -> Kept:
    """The `count` tokens of highest rank [B K T] per row and head, with their score, in `slots` slots."""
    K, T = block.k.shape[1:3]
    block = clean(block)
    pos = jnp.broadcast_to(block.pos, (block.pos.shape[0], K, T))
    idx = ranked(rank, pos)[:, :, :count]
    pos, score, k, v = (gather(x, idx) for x in (pos, score, block.k, block.v))
    grow = lambda x, fill: jnp.pad(  # noqa: E731
        x, [(0, slots - idx.shape[2] if a == 2 else 0) for a in range(x.ndim)], constant_values=fill
    )
    score = jnp.where(pos >= 0, score, jnp.zeros((), score.dtype))
    return Kept(memory.pack(grow(k, 0)), memory.pack(grow(v, 0)), grow(pos, -1), grow(score, 0))


def admit(state: Kept, fresh: Block) -> Kept:
    """Puts one fresh token per row [B K 1 H] into the first empty slot of each head, with score 0; padding nowhere."""
    slot = jnp.where(fresh.pos >= 0, jnp.argmin(state.pos, 2, keepdims=True).astype(jnp.int32), -1)
    pos = jnp.broadcast_to(fresh.pos, slot.shape)
    k, v = put_rows(state.k, fresh.k, slot), put_rows(state.v, fresh.v, slot)
    return Kept(k, v, put_at(state.pos, pos, slot), put_at(state.score, jnp.zeros(slot.shape, state.score.dtype), slot))


def attend(state: Kept, q: Array, q_pos: Array, window: int | None) -> tuple[Array, Array]:
    """One query per row, q [B K G 1 H], over all slots -> (out f32[B K G 1 H], softmax weights f32[B K G S])."""
    s = jnp.where(visible(state.pos, q_pos, window), scores(q, memory.unpack(state.k)), NEG)
    p, _, l = weights(s)
    p = p / jnp.maximum(l, 1e-30)[..., None]
    return mix(p, memory.unpack(state.v)), p[:, :, :, 0]


def one_by_one(step: Callable, state: Any, q: Array, fresh: Block, commit: int) -> tuple[Array, Any]:
    """step(state, q, fresh) -> (out, state) for each of T tokens in turn; the state is the one after `commit` of them.

    q [B K G T H], fresh [B K T H] with pos i32[B 1 T]. Returns out f32[B K G T H].
    """
    T = q.shape[3]
    if T == 1:
        out, after = step(state, q, fresh)
        return out, after if commit else state
    xs = (jnp.moveaxis(q, 3, 0)[..., None, :], jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0)[:, :, :, None], fresh))
    cut = lambda a, b: jax.tree.map(lambda x: x[a:b], xs)  # noqa: E731
    scan = lambda state, xs: lax.scan(lambda s, x: step(s, *x)[::-1], state, xs)  # noqa: E731
    state, out = scan(state, cut(0, commit))
    if commit < T:
        out = jnp.concatenate([out, scan(state, cut(commit, T))[1]])
    return jnp.moveaxis(out[..., 0, :], 0, 3), state


def need_config(config: Config | None, method: str) -> Config:
    """config; raises KvjaxError when the method was not planned for a model."""
    if config is None:
        raise KvjaxError(f"{method} changes positions and needs the model's RoPE; use plan(config)[layer] of it")
    return config


def need(obs: Obs | None, method: str, which: str) -> Obs:
    """obs; raises KvjaxError when the caller brought none."""
    if obs is None:
        raise KvjaxError(f"{method} needs {which} of the prompt in obs, got None; collect them in the prefill")
    return obs
