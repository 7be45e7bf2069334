"""Kernels of linear maps as integer codes with scales: 8 bits by output channel, 4 bits by groups of inputs."""

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

CODE_RANGES = {"int8": (-127, 127), "int4": (-8, 7)}
"""The lowest and the highest code of each kind of weights."""
GROUP_INPUTS = 32
"""Inputs of an output channel that share a scale in 4 bits."""


class QuantizedKernel(TypedDict):
    """What stands in a parameter tree in place of a kernel.

    A dict, so that everything that walks parameters by their paths (checkpoints, shardings, fingerprints) finds codes
    and scale as parameters of their own.
    """

    codes: Array  # i8 or i4, in the shape of the kernel
    scale: Array  # [out-axes] in 8 bits, [groups out-axes] in 4; in the dtype of the kernel


def check_weights(weights: str | None) -> None:
    """Raises KvjaxError unless `weights` is None or a kind of codes."""
    if weights is not None and (not isinstance(weights, str) or weights not in CODE_RANGES):
        raise KvjaxError(f"weights={weights!r:.60} is no kind of weights; take 'int8', 'int4', or None for the dtype's")


def is_quantized(kernel: Any) -> bool:
    """Whether a kernel of a parameter tree is a `QuantizedKernel`."""
    return isinstance(kernel, Mapping)


def has_groups(kernel: Mapping[str, Any]) -> bool:
    """Whether groups of inputs have scales of their own in a `QuantizedKernel`, as in 4 bits."""
    return kernel["codes"].dtype == jnp.int4


@functools.partial(jax.jit, static_argnames=("weights", "num_inputs", "num_maps"))
def quantize(kernel: Array, weights: str, num_inputs: int = 1, num_maps: int = 0) -> QuantizedKernel:
    """Rounds each weight to the nearest code times scale.

    In 8 bits a scale is the largest magnitude of its channel over 127. In 4 bits the weight of largest magnitude in a
    group has the code -8, which has no positive counterpart, by a scale of either sign.

    Args:
      kernel: [maps.. in-axes.. out-axes..].
      weights: "int8" for a scale by output channel, "int4" for one by `GROUP_INPUTS` inputs of an output channel.
      num_inputs: number of input axes.
      num_maps: axes before them, along which the maps are independent, as those of experts.

    Reference:
      llama.cpp, `quantize_row_q4_0_ref`, for the codes in 4 bits
    """
    if num_maps:
        each = functools.partial(quantize, weights=weights, num_inputs=num_inputs, num_maps=num_maps - 1)
        return jax.vmap(each)(kernel)
    size_in, out = math.prod(kernel.shape[:num_inputs]), kernel.shape[num_inputs:]
    groups = _split_inputs(kernel.astype(jnp.float32), num_inputs, size_in if weights == "int8" else GROUP_INPUTS)
    if weights == "int8":
        unrounded = jnp.abs(groups).max(1, keepdims=True) * np.float32(1 / 127)
    else:
        unrounded = jnp.take_along_axis(groups, jnp.abs(groups).argmax(1, keepdims=True), 1) * np.float32(-1 / 8)
    # A weight that is not finite shows in its scale: no code stands for it, and a CPU's maximum passes over NaN.
    unrounded = jnp.where(jnp.isfinite(groups).all(1, keepdims=True), unrounded, jnp.nan)
    # The codes are those of the scale as it is stored, which 16 bits round.
    scale = unrounded.astype(kernel.dtype)
    divisor = jnp.where(scale == 0, jnp.ones_like(scale), scale).astype(jnp.float32)
    codes = jnp.clip(jnp.round(groups / divisor), *CODE_RANGES[weights])
    codes = codes.reshape(-1, *out)[:size_in].reshape(kernel.shape)
    return {"codes": codes.astype(jnp.dtype(weights)), "scale": scale.squeeze((0, 1) if weights == "int8" else 1)}


def dequantize(kernel: Any, num_inputs: int = 1) -> Array:
    """Returns a kernel [in-axes.. out-axes..] as numbers of its scale's dtype; one that is not quantized as it is."""
    if not is_quantized(kernel):
        return kernel
    codes, scale = kernel["codes"], kernel["scale"]
    if not has_groups(kernel):
        return codes.astype(scale.dtype) * jnp.expand_dims(scale, range(num_inputs))
    # By a reshape: repeated scales would be a second matrix in a GPU's memory.
    restored = _split_inputs(codes.astype(scale.dtype), num_inputs, GROUP_INPUTS) * scale[:, None]
    size_in = math.prod(codes.shape[:num_inputs])
    return restored.reshape(-1, *codes.shape[num_inputs:])[:size_in].reshape(codes.shape)


def _split_inputs(kernel: Array, num_inputs: int, size: int) -> Array:
    """Reshapes a kernel [in-axes.. out-axes..] to [groups size out-axes..], with zeros after the last inputs."""
    out = kernel.shape[num_inputs:]
    inputs = kernel.reshape(-1, *out)
    padding = [(0, -len(inputs) % size)] + [(0, 0)] * len(out)
    return jnp.pad(inputs, padding).reshape(-1, size, *out)


def as_matrix(kernel: Any, num_inputs: int) -> Any:
    """Reshapes a kernel [in-axes.. out-axes..], quantized or not, to [in out]."""
    if not is_quantized(kernel):
        return kernel.reshape(math.prod(kernel.shape[:num_inputs]), -1)
    codes, scale = as_matrix(kernel["codes"], num_inputs), kernel["scale"]
    return {"codes": codes, "scale": scale.reshape(*scale.shape[: has_groups(kernel)], codes.shape[1])}
