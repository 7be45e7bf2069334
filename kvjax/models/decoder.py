"""The decoder. Model families are fields of `Config`, and the caller's `attend` decides what attention reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.core.matmul import unembed
from kvjax.core.rope import rotate
from kvjax.core.types import Array
from kvjax.models.config import Config
from kvjax.models.layers import Linear, RMSNorm

Angles = tuple[Array, Array]  # cos and sin, each f32[B T H/2]
Attend = Callable[[int, Array, Array, Array, Array], tuple[Array, Any]]
"""(layer, q [B K G T H], k [B K T H], both after RoPE, v [B K T H], the attention's input x [B T D]) -> (attention
output [B K G T H], the layer's new state)."""


class Attention(nn.Module):
    """The projections and RoPE around `attend`."""

    config: Config
    layer: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, angles: Angles, attend: Attend, query_indices: Array | None) -> tuple[Array, Any]:
        c = self.config
        D, K, G, H = c.width, c.kv_heads, c.groups, c.head_dim
        linear = functools.partial(Linear, dtype=self.dtype)
        x_q = take_tokens(x, query_indices)
        q = jnp.moveaxis(linear("D K G H", (D, K, G, H), bias=c.qkv_bias, name="q")(x_q), 1, 3)
        k = jnp.moveaxis(linear("D K H", (D, K, H), bias=c.qkv_bias, name="k")(x), 1, 2)
        v = jnp.moveaxis(linear("D K H", (D, K, H), bias=c.qkv_bias, name="v")(x), 1, 2)
        if c.qk_norm:
            q = RMSNorm(H, c.norm_eps, "H", self.dtype, name="q_norm")(q)
            k = RMSNorm(H, c.norm_eps, "H", self.dtype, name="k_norm")(k)
        q = rotate(q, *(take_tokens(a, query_indices)[:, None, None] for a in angles))
        k = rotate(k, *(a[:, None] for a in angles))
        out, state = attend(self.layer, q, k, v, x)
        out = jnp.moveaxis(out.astype(x.dtype), 3, 1)
        return linear("K G H D", (K, G, H, D), contract=3, bias=c.out_bias, name="o")(out), state


class MLP(nn.Module):
    """Gated SiLU feed-forward (Shazeer, 2020)."""

    config: Config
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array) -> Array:
        D, F = self.config.width, self.config.mlp_width
        linear = functools.partial(Linear, bias=self.config.mlp_bias, dtype=self.dtype)
        gate, up = linear("D F", (D, F), name="gate")(x), linear("D F", (D, F), name="up")(x)
        return linear("F D", (F, D), name="down")(jax.nn.silu(gate) * up)


class Layer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    config: Config
    layer: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x: Array, angles: Angles, attend: Attend, query_indices: Array | None = None
    ) -> tuple[Array, Any]:
        """Computes the outputs [B Q D] of the tokens at query_indices i32[B Q], or of all; keys and values of all."""
        c = self.config
        norm = functools.partial(RMSNorm, c.width, c.norm_eps, dtype=self.dtype)
        with jax.named_scope("attention"):
            attention = Attention(c, self.layer, self.dtype, name="attention")
            y, state = attention(norm(name="attention_norm")(x), angles, attend, query_indices)
        x = take_tokens(x, query_indices) + y
        with jax.named_scope("mlp"):
            return x + MLP(c, self.dtype, name="mlp")(norm(name="mlp_norm")(x)), state


def take_tokens(x: Array, indices: Array | None) -> Array:
    """Takes from x [B T ...] the tokens of each sequence at i32[B Q]: [B Q ...]; None takes all."""
    return x if indices is None else jnp.take_along_axis(x, jnp.expand_dims(indices, range(2, x.ndim)), 1)


def init(config: Config, key: Array, dtype: Any = jnp.float32) -> Any:
    """Initializes parameters, boxed with their axis letters (`flax.linen.unbox` drops these)."""
    zero = jnp.zeros((1, 1), jnp.int32)
    # Only shapes matter here, so that attention may return its queries.
    variables = Decoder(config, dtype).init(key, zero, zero, lambda i, q, k, v, x: (q, None), method=Decoder.logits)
    return variables["params"]


class Decoder(nn.Module):
    """tokens i32[B T], pos i32[B T] -> (hidden states [B T D] after the final norm, the layers' states)."""

    config: Config
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        c = self.config
        init: Any = nn.with_logical_partitioning(nn.initializers.normal(c.width**-0.5), ("V", "D"))
        self.embedding = self.param("embedding", init, (c.vocab_size, c.width), self.dtype)
        self.blocks = [Layer(c, i, self.dtype, name=f"layer_{i}") for i in range(c.layers)]
        self.final_norm = RMSNorm(c.width, c.norm_eps, dtype=self.dtype)
        if not c.tie_embeddings:
            self.head = Linear("D V", (c.width, c.vocab_size), dtype=self.dtype)

    def __call__(self, tokens: Array, pos: Array, attend: Attend) -> tuple[Array, tuple]:
        x, angles = self.embed(tokens, pos)
        states = []
        for block in self.blocks:
            x, state = block(x, angles, attend)
            states.append(state)
        return self.final_norm(x), tuple(states)

    def embed(self, tokens: Array, pos: Array) -> tuple[Array, Angles]:
        """Returns the first layer's input: (x [B T D], the angles of RoPE)."""
        return self.embedding[tokens], self.config.rope.angles(pos)

    def finish(self, x: Array) -> Array:
        """Turns the last layer's output [... D] into logits f32[... V]."""
        return self.unembed(self.final_norm(x))

    def unembed(self, hidden: Array) -> Array:
        """Turns hidden states after the final norm [... D] into logits f32[... V]."""
        if not self.config.tie_embeddings:
            return self.head(hidden).astype(jnp.float32)
        return unembed(hidden.reshape(-1, hidden.shape[-1]), self.embedding).reshape(*hidden.shape[:-1], -1)

    def logits(self, tokens: Array, pos: Array, attend: Attend) -> tuple[Array, tuple]:
        """Runs `__call__`, then `unembed`: (logits f32[B T V], the layers' states)."""
        hidden, states = self(tokens, pos, attend)
        return self.unembed(hidden), states
