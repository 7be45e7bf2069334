"""Exact causal attention for training: differentiable, in query blocks that read only their past."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kvjax.core.types import Array


# Checkpointed: a backward pass through all blocks at once would hold every block's weights, T x T numbers in all.
@functools.partial(jax.checkpoint, static_argnums=(3,))
def _block(q: Array, k: Array, v: Array, start: int) -> Array:
    """Attention of q [B K G T H], at positions from `start` on, to k, v [B K S H]."""
    # The denominator is one more column of the value product, and the maximum has no gradient. Neither pass then
    # reduces over the minor axis, which XLA's CPU backend does not vectorize (4x faster than jax.nn.softmax).
    B, K, G, T, H = q.shape
    s = jnp.einsum("bksh,bkmh->bksm", k, q.reshape(B, K, G * T, H) * H**-0.5)
    future = jnp.arange(k.shape[2])[:, None] > start + jnp.arange(T)[None]
    s = jnp.where(jnp.tile(future, (1, G))[None, None], -1e30, s)
    p = jnp.exp(s - jax.lax.stop_gradient(s.max(-2, keepdims=True)))
    out = jnp.einsum("bksm,bksh->bkmh", p, jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1))
    return (out[..., :H] / out[..., H:]).reshape(q.shape)


def causal(q: Array, k: Array, v: Array, block: int = 256) -> Array:
    """Causal attention of q [B K G T H] to k, v [B K T H], in blocks of queries."""
    T = q.shape[3]
    ends = [(i, min(i + block, T)) for i in range(0, T, block)]
    return jnp.concatenate([_block(q[:, :, :, i:e], k[:, :, :e], v[:, :, :e], i) for i, e in ends], 3)
