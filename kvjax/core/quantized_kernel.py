"""Kernels of linear maps as integer codes with scales: 8 bits by output channel, 4 bits by groups of input rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.types import Array
from kvjax.errors import KvjaxError

LARGEST_CODES = {"int8": 127, "int4": 7}
"""The largest code of each kind; the lowest is its negative, so that zero is a code."""
GROUP_ROWS = 128
"""Input rows that share a scale in 4 bits."""


class QuantizedKernel(TypedDict):
    """What stands in a parameter tree in place of a kernel.

    A dict, so that everything that walks parameters by their paths (checkpoints, shardings, fingerprints) finds codes
    and scale as parameters of their own.
    """

    codes: Array  # i8 or i4, in the shape of the kernel
    scale: Array  # [out-axes] in 8 bits, [groups out-axes] in 4; in the dtype of the kernel


def check_weights(weights: str | None) -> None:
    """Raises KvjaxError unless `weights` is None or a kind of codes."""
    if weights is not None and (not isinstance(weights, str) or weights not in LARGEST_CODES):
        raise KvjaxError(f"weights={weights!r:.60} is no kind of weights; take 'int8', 'int4', or None for the dtype's")


def is_quantized(kernel: Any) -> bool:
    """Whether a kernel of a parameter tree is a `QuantizedKernel`."""
    return isinstance(kernel, Mapping)


@functools.partial(jax.jit, static_argnames=("weights", "num_inputs", "num_maps"))
def quantize(kernel: Array, weights: str, num_inputs: int = 1, num_maps: int = 0) -> QuantizedKernel:
    """Rounds a kernel to codes: scale = absmax / largest code, code = round(weight / scale).

    Args:
      kernel: [maps.. in-axes.. out-axes..].
      weights: "int8" for a scale by output channel, "int4" for one by `GROUP_ROWS` input rows and output channel.
      num_inputs: number of input axes.
      num_maps: axes before them, along which the maps are independent, as those of experts.
    """
    if num_maps:
        each = functools.partial(quantize, weights=weights, num_inputs=num_inputs, num_maps=num_maps - 1)
        return jax.vmap(each)(kernel)
    size_in, out, largest = math.prod(kernel.shape[:num_inputs]), kernel.shape[num_inputs:], LARGEST_CODES[weights]
    rows = kernel.reshape(size_in, *out).astype(jnp.float32)
    if weights == "int4":
        rows = jnp.pad(rows, ((0, -size_in % GROUP_ROWS), *((0, 0) for _ in out))).reshape(-1, GROUP_ROWS, *out)
    axis = rows.ndim - len(out) - 1
    # The codes are those of the scale as it is stored, which 16 bits round.
    scale = (jnp.abs(rows).max(axis, keepdims=True) * np.float32(1 / largest)).astype(kernel.dtype)
    divisor = jnp.where(scale == 0, jnp.ones_like(scale), scale).astype(jnp.float32)
    codes = jnp.clip(jnp.round(rows / divisor), -largest, largest)
    codes = codes.reshape(-1, *out)[:size_in].reshape(kernel.shape)
    return {"codes": codes.astype(jnp.dtype(weights)), "scale": scale.squeeze(axis)}


def dequantize(kernel: Any, num_inputs: int = 1) -> Array:
    """Returns a kernel [in-axes.. out-axes..] as numbers of its scale's dtype; one that is not quantized as it is."""
    if not is_quantized(kernel):
        return kernel
    codes, scale = kernel["codes"], kernel["scale"]
    if codes.dtype == jnp.int8:
        return codes.astype(scale.dtype) * jnp.expand_dims(scale, range(num_inputs))
    size_in = math.prod(codes.shape[:num_inputs])
    return codes.astype(scale.dtype) * jnp.repeat(scale, GROUP_ROWS, axis=0)[:size_in].reshape(codes.shape)


def as_matrix(kernel: Any, num_inputs: int) -> Any:
    """Reshapes a kernel [in-axes.. out-axes..], quantized or not, to [in out]."""
    if not is_quantized(kernel):
        return kernel.reshape(math.prod(kernel.shape[:num_inputs]), -1)
    codes, scale = as_matrix(kernel["codes"], num_inputs), kernel["scale"]
    return {"codes": codes, "scale": scale.reshape(*scale.shape[:1] * (codes.dtype != jnp.int8), codes.shape[1])}
