"""Norms, rotary embeddings and linear maps; every parameter declares its axis letters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.core.types import Array
from kvjax.models.config import Config


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in float32 whatever the dtype (Zhang & Sennrich, 2019)."""

    size: int
    eps: float
    axis: str = "D"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param(
            "scale", nn.with_logical_partitioning(nn.initializers.ones, (self.axis,)), (self.size,), self.dtype
        )
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1))


class Linear(nn.Module):
    """A linear map named by axis letters: `axes="D K G H"` holds a kernel [D, K, G, H]; contracts the first axes.

    x [... in-axes] -> [... out-axes]. One matrix product: with more axes XLA transposes the kernel each time.
    """

    axes: str
    shape: Sequence[int]
    contract: int = 1
    bias: bool = False
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        names, shape, n = tuple(self.axes.split()), tuple(self.shape), self.contract
        size_in, size_out, lead = math.prod(shape[:n]), math.prod(shape[n:]), x.shape[: x.ndim - n]
        init = nn.with_logical_partitioning(nn.initializers.normal(size_in**-0.5), names)
        kernel = self.param("kernel", init, shape, self.dtype)
        y = (x.reshape(-1, size_in) @ kernel.reshape(size_in, size_out)).reshape(*lead, *shape[n:])
        if self.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, names[n:])
            y = y + jnp.expand_dims(self.param("bias", zeros, shape[n:], self.dtype), range(len(lead)))
        return y


def rope_frequencies(config: Config) -> Array:
    """f32[rotary_dim / 2], radians per position (Su et al., 2021; scaling as in `RopeScaling`)."""
    half = config.rotary_dim // 2
    freq = 1.0 / config.rope_theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    s = config.rope_scaling
    if s is None:
        return freq
    if s.kind == "linear":
        return freq / s.factor
    wavelength = 2 * jnp.pi / freq
    long, short = s.original_max_positions / s.low_freq_factor, s.original_max_positions / s.high_freq_factor
    smooth = (s.original_max_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blended = (1 - smooth) * freq / s.factor + smooth * freq
    return jnp.where(wavelength > long, freq / s.factor, jnp.where(wavelength < short, freq, blended))


def rope_angles(config: Config, pos: Array) -> tuple[Array, Array]:
    """pos i32[B T] -> (cos, sin), each f32[B T rotary_dim / 2]."""
    angle = jnp.multiply.outer(pos.astype(jnp.float32), rope_frequencies(config))
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the leading channels of x [..., H]; the pairs are (i, i + rotary_dim / 2). Negate sin to undo it.

    cos and sin broadcast against x's leading axes: [..., rotary_dim / 2]. Computed in float32.
    """
    half = cos.shape[-1]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], -1)
