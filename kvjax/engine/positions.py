"""Positions of tokens in left-aligned, right-padded batches."""

from __future__ import annotations

import jax.numpy as jnp

from kvjax.core.types import Array


def token_positions(tokens: Array, lengths: Array | None = None) -> Array:
    """Positions i32[B T]: 0, 1, 2, .. in each sequence, -1 at and beyond lengths i32[B].

    Only the shape of `tokens` [B T] is read, so that any array of one entry per token serves.
    """
    pos = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape[:2])
    return pos if lengths is None else jnp.where(pos < lengths[:, None], pos, -1)
