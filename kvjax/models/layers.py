"""RMSNorm and linear maps; every parameter declares its axis letters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.core.matmul import matmul
from kvjax.core.types import Array


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 (Zhang & Sennrich, 2019)."""

    size: int
    eps: float
    axis: str = "D"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        ones: Any = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
        scale = self.param("scale", ones, (self.size,), self.dtype)
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1))


class Linear(nn.Module):
    """A linear map named by axis letters: x [... in-axes] -> [... out-axes]."""

    axes: str  # of the kernel, as "D K G H", input axes first
    shape: Sequence[int]  # of the kernel
    contract: int = 1  # number of input axes
    bias: bool = False
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        names, shape, n = tuple(self.axes.split()), tuple(self.shape), self.contract
        size_in, size_out, lead = math.prod(shape[:n]), math.prod(shape[n:]), x.shape[: x.ndim - n]
        init: Any = nn.with_logical_partitioning(nn.initializers.normal(size_in**-0.5), names)
        kernel = self.param("kernel", init, shape, self.dtype)
        # As one matrix product: a contraction over several axes makes XLA transpose the kernel each time.
        y = matmul(x.reshape(-1, size_in), kernel.reshape(size_in, size_out)).reshape(*lead, *shape[n:])
        if self.bias:
            zeros: Any = nn.with_logical_partitioning(nn.initializers.zeros, names[n:])
            y = y + jnp.expand_dims(self.param("bias", zeros, shape[n:], self.dtype), range(len(lead)))
        return y
