"""The order of tokens in a ring: token i of a sequence, counted from 0, is in slot i modulo the number of slots."""

from __future__ import annotations

import jax.numpy as jnp

from kvjax.core.types import Array


def count_tokens(pos: Array, ring_slots: int) -> Array:
    """Counts the tokens i32[B] of sequences whose last ones have the positions pos i32[B 1 S].

    In a ring, where S is `ring_slots`, tokens of all rounds count. Their number is known modulo S alone where it is
    above S, and the result is the one from S to 2 S - 1.
    """
    held, slots = (pos[:, 0] >= 0).sum(-1, dtype=jnp.int32), pos.shape[2]
    if slots == 0 or slots != ring_slots:  # a side store may leave a cache without any slot
        return held
    last = jnp.argmax(pos[:, 0], -1).astype(jnp.int32)
    return jnp.where(held < slots, held, slots + (last + 1) % slots)


def nearest_token(slot: Array, to: Array, slots: int) -> Array:
    """Returns the token whose place is in slot i32[B ...], the nearest of all such tokens to token `to` i32[B ...]."""
    half = slots // 2
    return to - half + (slot - to + half) % slots


def first_token(slot: Array, start: Array, slots: int) -> Array:
    """Returns the first token from token `start` i32[B ...] on whose place is slot i32[B ...]."""
    return start + (slot - start) % slots


def last_token(slot: Array, end: Array, slots: int) -> Array:
    """Returns the last token before token `end` i32[B ...] whose place is slot i32[B ...]; negative for none."""
    return end - slots + (slot - end) % slots
