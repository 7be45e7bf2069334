"""Which tokens leave while decoding: what all policies share.

The order of slots means nothing under a policy: a fresh token goes into the first empty slot of each head, `pos` says
which token is where, and a token leaves by setting its `pos` to -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from kvjax.cache.protocol import LayerState
from kvjax.core.attention_mass import Observation
from kvjax.core.types import Array, KVBlock
from kvjax.errors import KvjaxError

if TYPE_CHECKING:
    from kvjax.cache.bound_layer import MethodLayer


class Policy:
    """The `decode` slot of a method: it counts something per token, and says which tokens leave.

    A policy is a frozen dataclass. It owns what it counts, its marks, and never keys or values: these are held by the
    method's codecs, wherever these hold them. `layer.spec`, a `LayerSpec`, says of the layer which it is of how many,
    its heads and groups, the size of a head, its sliding window and its rotary embedding.
    """

    num_queries: int | None = 0  # of a row's last prompt queries, as in `Needs`
    needs_weights = False  # whether `after_token` wants the attention weights of a step

    def num_slots(self, layer: MethodLayer) -> int:
        """Slots that the layer takes: the tokens that stay after a step, and the next one."""
        raise NotImplementedError

    def num_kept(self, layer: MethodLayer, prompt: int) -> int:
        """Most tokens that a prompt of this length leaves."""
        return min(prompt, self.num_slots(layer) - 1)

    def init(
        self, layer: MethodLayer, block: KVBlock, observation: Observation | None, slots: int
    ) -> tuple[Array, Any]:
        """Which tokens of a prompt stay: (their slots in the block, i32[B 1|K n], -1 in unused places; the marks)."""
        raise NotImplementedError

    def before_token(self, layer: MethodLayer, state: LayerState, q: Array, q_pos: Array) -> LayerState:
        """The state before a token with query q [B K G 1 H] at q_pos i32[B 1] comes in; the base changes nothing."""
        return state

    def after_token(
        self, layer: MethodLayer, state: LayerState, weights: Array | None, q_pos: Array
    ) -> tuple[Array, Any]:
        """(pos, marks) after that token has attended with weights f32[B K G S]: whatever now has pos -1 has left.

        It runs for rows that got no token, too, whose q_pos is -1: their pos and marks have to stay as they are.
        """
        raise NotImplementedError

    def check(self, layer: MethodLayer) -> None:
        """Raises IncompatibleMethod for other slots of the method that this policy cannot work with."""

    def index(self, layer: MethodLayer, held: Array, pos: Array) -> Array:
        """Positions counted inside the cache: of tokens at pos i32[B 1|K T], among those held i32[B 1|K S]."""
        later = jnp.iinfo(jnp.int32).max
        order = jnp.sort(jnp.where(held < 0, later, held), -1)
        return jnp.where(pos < 0, 0, _rank(order, pos))


def _rank(order: Array, pos: Array) -> Array:
    """How many of order i32[B K S], ascending, are below each of pos i32[B 1|K T]."""
    B, K, _ = order.shape
    pos = jnp.broadcast_to(pos, (B, K, pos.shape[2]))
    flat = (order.reshape(B * K, -1), pos.reshape(B * K, -1))
    return lax.map(lambda x: jnp.searchsorted(*x).astype(jnp.int32), flat).reshape(pos.shape)


def check_minimum(method: str, **fields: tuple[int, int]) -> None:
    """Raises KvjaxError unless each field, given as (value, least), is at least `least`."""
    for name, (value, least) in fields.items():
        if value < least:
            raise KvjaxError(f"{name} of {method} must be at least {least}, got {value}; use {name}={least} or more")


def require_observation(observation: Observation | None, method: str, which: str) -> Observation:
    """The queries that were asked for; raises KvjaxError when the caller brought none."""
    if observation is None:
        raise KvjaxError(f"{method} needs {which} of the prompt in obs, got None; collect them in the prefill")
    return observation


def sort_newest_first(score: Array, pos: Array) -> Array:
    """Slots i32[B K S] from the highest score to the lowest; the newer token first among equals, empty slots last."""
    slot = jnp.broadcast_to(jnp.arange(pos.shape[2], dtype=jnp.int32)[None, None], pos.shape)
    return lax.sort(((pos < 0).astype(jnp.int32), -score, -pos, slot), dimension=2, num_keys=3)[3]


def top_slots(score: Array, pos: Array, count: int) -> Array:
    """The slots i32[B K n] of the `count` tokens of highest score f32[B K S], -1 in unused places."""
    order = sort_newest_first(score, jnp.broadcast_to(pos, score.shape))[:, :, :count]
    held = jnp.take_along_axis(jnp.broadcast_to(pos, score.shape), order, 2)
    return jnp.where(held >= 0, order, -1)


def evict_lowest(rank: Array, pos: Array, may_leave: Array, real: Array) -> Array:
    """pos i32[B K S] after the token of the lowest rank f32[B K S] has left, of equals the oldest.

    may_leave bool[B K S]: the tokens among which it is. real bool[B 1 1]: rows that took a token; of these only heads
    without an empty slot lose one.
    """
    rank = jnp.where(may_leave, rank, jnp.inf)
    lowest = may_leave & (rank == rank.min(2, keepdims=True))
    oldest = jnp.where(lowest, pos, jnp.iinfo(jnp.int32).max).min(2, keepdims=True)
    full = (pos >= 0).all(2, keepdims=True) & real
    return jnp.where(full & lowest & (pos == oldest), -1, pos)


def policy_state_at(marks: Array, chosen: Array, slots: int) -> Array:
    """Marks [B K T] of a prompt's tokens at chosen i32[B K n], as those of the first n of `slots` slots; else 0."""
    kept = jnp.take_along_axis(marks, jnp.maximum(chosen, 0), 2)
    kept = jnp.where(chosen >= 0, kept, jnp.zeros((), marks.dtype))
    return jnp.pad(kept, [(0, 0), (0, 0), (0, slots - chosen.shape[2])])


def first_empty_slot(pos: Array) -> Array:
    """i32[B 1|K]: an empty slot of each head."""
    return jnp.argmin(pos, 2).astype(jnp.int32)
