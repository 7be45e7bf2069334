"""Which parameters are quantized, and the parameter trees of quantized models.

Kernels of projections, feed-forward parts, experts and of a head that is not tied become codes. Embeddings, norms,
biases, sinks, routers, and latent attention's up-projections of keys and values stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from kvjax.core.explicit_axes import leave_explicit_mesh
from kvjax.core.quantized_kernel import LARGEST_CODES, quantize

GROUPS = "groups"
"""The axis of a scale that counts groups of input rows. No mesh divides it, as a group may lie on two devices."""


def _find_axes(path: tuple[str, ...], ndim: int) -> tuple[int, int] | None:
    """Returns the numbers of maps' and of input axes of a kernel; None for a parameter that is not quantized."""
    if path[-1] != "kernel" or path[-2] == "router":
        return None
    return int(path[-3:-2] == ("mlp",) and ndim == 3), 3 if path[-2] == "o" else 1


def quantize_params(params: Mapping[str, Any], weights: str) -> dict[str, Any]:
    """Quantizes the kernels of a parameter tree, or of some of its top-level entries, each with its name.

    Args:
      params: arrays of JAX or NumPy.
      weights: "int8" or "int4".
    """
    flat: dict[tuple[str, ...], Any] = flatten_dict(params)
    for path, x in flat.items():
        if (axes := _find_axes(path, x.ndim)) is not None:
            kernel = leave_explicit_mesh(jnp.asarray(x))
            flat[path] = quantize(kernel, weights=weights, num_maps=axes[0], num_inputs=axes[1])
    return unflatten_dict(flat)


def quantize_boxes(boxes: Mapping[str, Any], weights: str) -> dict[str, Any]:
    """Does the same with shapes that are boxed with their axis letters, as `abstract_params` returns them."""
    flat: dict[tuple[str, ...], Any] = flatten_dict(boxes)
    for path, box in flat.items():
        if (axes := _find_axes(path, box.value.ndim)) is None:
            continue
        num_maps, num_inputs = axes
        shapes = jax.eval_shape(
            lambda x, n=num_maps, m=num_inputs: quantize(x, weights=weights, num_maps=n, num_inputs=m), box.value
        )
        groups = (GROUPS,) * (weights == "int4")
        names = box.names[:num_maps] + groups + box.names[num_maps + num_inputs :]
        flat[path] = {
            "codes": nn.LogicallyPartitioned(shapes["codes"], box.names),
            "scale": nn.LogicallyPartitioned(shapes["scale"], names),
        }
    return unflatten_dict(flat)


def is_codes(path: str) -> bool:
    """Whether a path, as "layer_0/attention/q/kernel/codes", leads to the codes of a kernel."""
    return path.endswith("/kernel/codes")


def weights_of(dtypes: Mapping[str, Any]) -> str | None:
    """Returns the kind of codes, given the dtypes of parameters by their paths; None where no kernel is quantized."""
    names = {str(dtype) for path, dtype in dtypes.items() if is_codes(path)}
    return next((name for name in LARGEST_CODES if names == {name}), None)


def count_bits(dtype: Any) -> int:
    """Returns the bits of a number in the memory of an accelerator; a CPU holds 4 bits in a byte."""
    return 4 if dtype == jnp.int4 else 8 * jnp.dtype(dtype).itemsize
