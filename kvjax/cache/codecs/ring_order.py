"""The order of tokens in a ring: token i of a sequence, counted from 0, is in slot i modulo the number of slots."""

from __future__ import annotations

import jax.numpy as jnp

from kvjax.core.types import Array


def count_tokens(pos: Array) -> Array:
    """The number of tokens i32[B], in all rounds, of sequences whose last ones are at pos i32[B 1 S].

    Where they are more than S it is known modulo S alone, and the result is the one from S to 2 S - 1.
    """
    held, slots = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32), pos.shape[2]
    last = jnp.argmax(pos[:, 0], -1).astype(jnp.int32)
    return jnp.where(held < slots, held, slots + (last + 1) % slots)


def nearest_token(slot: Array, to: Array, slots: int) -> Array:
    """Of all tokens that have their place in slot i32[B ...], the one that is nearest to token `to` i32[B ...]."""
    half = slots // 2
    return to - half + (slot - to + half) % slots


def last_token(slot: Array, end: Array, slots: int) -> Array:
    """Of all tokens before token `end` i32[B ...], the last whose place is slot i32[B ...]; negative for none."""
    return end - slots + (slot - end) % slots
