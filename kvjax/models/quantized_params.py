"""Which parameters are quantized, and the parameter trees of quantized models.

Kernels of projections, feed-forward parts, experts and of a head that is not tied become codes. Embeddings, norms,
biases, sinks, routers, gates of a shared expert, decays, write strengths and kernels of convolutions, and latent
attention's up-projections of keys and values stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from kvjax.core.explicit_axes import leave_explicit_mesh
from kvjax.core.quantized_kernel import CODE_RANGES, has_groups, quantize

CHOICE_BIAS = "choice_bias"
"""The parameter by which experts with sigmoids are chosen."""
LOG_RATE, DECAY_BIAS = "log_rate", "decay_bias"
"""The parameters of a recurrence from which each token's decay follows."""
IN_FLOAT32 = tuple(f"/{name}" for name in (CHOICE_BIAS, LOG_RATE, DECAY_BIAS))
"""What the paths of parameters end with that are float32 in models of any dtype."""
UNQUANTIZED = ("router", "shared_gate", "decay", "write")
"""Linear maps to one number, for each expert or head, which multiplies or chooses many others."""
GROUPS = "groups"
"""The axis of a scale that counts groups of inputs. No mesh divides it, as a group may lie on two devices."""


def kernel_axes(path: tuple[str, ...], ndim: int) -> dict[str, int] | None:
    """Returns how many axes of a kernel count maps and inputs, as arguments of `quantize`.

    None for a parameter that is not quantized.
    """
    if path[-1] != "kernel" or path[-2] in UNQUANTIZED:
        return None
    # Kernels of experts are [E in out]; those of attention have as many axes, and its output map reads three of them.
    is_of_experts = path[-3:-2] == ("mlp",) and ndim == 3
    return {"num_maps": int(is_of_experts), "num_inputs": 3 if path[-2] == "o" else 1}


def quantize_params(params: Mapping[str, Any], weights: str) -> dict[str, Any]:
    """Quantizes the kernels of a parameter tree, or of some of its top-level entries, each with its name.

    Args:
      params: arrays of JAX or NumPy.
      weights: "int8" or "int4".
    """
    flat: dict[tuple[str, ...], Any] = flatten_dict(params)
    for path, x in flat.items():
        if (axes := kernel_axes(path, x.ndim)) is not None:
            flat[path] = quantize(leave_explicit_mesh(jnp.asarray(x)), weights=weights, **axes)
    return unflatten_dict(flat)


def quantize_boxes(boxes: Mapping[str, Any], weights: str) -> dict[str, Any]:
    """Does the same with shapes that are boxed with their axis letters, as `abstract_params` returns them."""
    flat: dict[tuple[str, ...], Any] = flatten_dict(boxes)
    for path, box in flat.items():
        if (axes := kernel_axes(path, box.value.ndim)) is None:
            continue
        shapes = jax.eval_shape(lambda x, axes=axes: quantize(x, weights=weights, **axes), box.value)
        maps, outputs = box.names[: axes["num_maps"]], box.names[sum(axes.values()) :]
        groups = (GROUPS,) if has_groups(shapes) else ()
        flat[path] = {
            "codes": nn.LogicallyPartitioned(shapes["codes"], box.names),
            "scale": nn.LogicallyPartitioned(shapes["scale"], (*maps, *groups, *outputs)),
        }
    return unflatten_dict(flat)


def is_codes(path: str) -> bool:
    """Whether a path, as "layer_0/attention/q/kernel/codes", leads to the codes of a kernel."""
    return path.endswith("/kernel/codes")


def find_dtype(path: str, dtype: Any, stored: Any) -> np.dtype:
    """Returns the dtype of a parameter in a model of `dtype`; `stored` is its own, which codes keep."""
    if path.endswith(IN_FLOAT32):
        return np.dtype("float32")
    return np.dtype(stored if is_codes(path) or dtype is None else dtype)


def weights_of(dtypes: Mapping[str, Any]) -> str | None:
    """Returns the kind of codes, given the dtypes of parameters by their paths; None where no kernel is quantized."""
    names = {str(dtype) for path, dtype in dtypes.items() if is_codes(path)}
    return next((name for name in CODE_RANGES if names == {name}), None)


def count_parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Counts the numbers of a model, given the shapes of its arrays by their paths; scales of codes do not count."""
    return sum(math.prod(shape) for path, shape in shapes.items() if not path.endswith("/kernel/scale"))


def count_bits(dtype: Any) -> int:
    """Returns the bits of a number in the memory of an accelerator; a CPU holds 4 bits in a byte."""
    return 4 if dtype == jnp.int4 else 8 * jnp.dtype(dtype).itemsize
