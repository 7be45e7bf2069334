"""Positions of tokens in left-aligned, right-padded batches."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Int32, Shaped

from kvjax.core.types import Array


def token_positions(tokens: Shaped[Array, "B T"], lengths: Int32[Array, " B"] | None = None) -> Int32[Array, "B T"]:
    """Positions 0, 1, 2, .. in each sequence, -1 at and beyond its length.

    Only the shape of `tokens` is read, so that any array of one entry per token serves.
    """
    pos = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape[:2])
    return pos if lengths is None else jnp.where(pos < lengths[:, None], pos, -1)
