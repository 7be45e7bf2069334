"""RMSNorm and linear maps; every parameter declares its axis letters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.core.matmul import matmul
from kvjax.core.quantized_kernel import as_matrix
from kvjax.core.types import Array


def divide_by_root_mean_square(x: Array, eps: float, num_axes: int = 1) -> Array:
    """Divides by the root mean square over the last axes, in float32."""
    y, axes = x.astype(jnp.float32), tuple(range(-num_axes, 0))
    return y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axes, keepdims=True) + eps)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axes, computed in float32 (Zhang & Sennrich, 2019)."""

    shape: Sequence[int]  # of the axes that are normalized together
    eps: float
    axes: str = "D"
    dtype: jnp.dtype = jnp.float32
    unit_offset: bool = False  # whether 1 + scale multiplies, as in Gemma

    @nn.compact
    def __call__(self, x: Array) -> Array:
        start = nn.initializers.zeros if self.unit_offset else nn.initializers.ones
        init: Any = nn.with_logical_partitioning(start, tuple(self.axes.split()))
        scale = self.param("scale", init, tuple(self.shape), self.dtype)
        lead = range(x.ndim - len(self.shape))
        y = divide_by_root_mean_square(x, self.eps, len(self.shape))
        if self.unit_offset:
            # Added in float32: 1 + scale, rounded to bfloat16, would lose most of a small scale.
            return (y * (1 + jnp.expand_dims(scale.astype(jnp.float32), lead))).astype(x.dtype)
        return y.astype(x.dtype) * jnp.expand_dims(scale, lead)


class Linear(nn.Module):
    """A linear map named by axis letters: x [... in-axes] -> [... out-axes]."""

    axes: str  # of the kernel, as "D K G H", input axes first
    shape: Sequence[int]  # of the kernel
    contract: int = 1  # number of input axes
    bias: bool = False
    dtype: jnp.dtype = jnp.float32
    in_float32: bool = False  # whether the vectors and a kernel, which has no codes, are multiplied in float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        names, shape, n = tuple(self.axes.split()), tuple(self.shape), self.contract
        size_in, lead = math.prod(shape[:n]), x.shape[: x.ndim - n]
        init: Any = nn.with_logical_partitioning(nn.initializers.normal(size_in**-0.5), names)
        # A `QuantizedKernel` may stand there too; Flax compares its codes' shape, the first leaf, with this one.
        kernel: Any = self.param("kernel", init, shape, self.dtype)
        # As one matrix product: a contraction over several axes makes XLA transpose the kernel each time.
        matrix = as_matrix(kernel, n)
        if self.in_float32:
            x, matrix = x.astype(jnp.float32), matrix.astype(jnp.float32)
        y = matmul(x.reshape(-1, size_in), matrix).reshape(*lead, *shape[n:])
        if self.bias:
            zeros: Any = nn.with_logical_partitioning(nn.initializers.zeros, names[n:])
            y = y + jnp.expand_dims(self.param("bias", zeros, shape[n:], self.dtype), range(len(lead)))
        return y
