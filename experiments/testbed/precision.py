"""Mixed precision for training: bfloat16 operands, float32 sums, parameters and activations float32."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from kvjax.core.types import Array
from kvjax.models.layers import Linear


def _product(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(equation: str, x: Array, y: Array) -> Array:
    """A two-operand einsum whose three products (its value and both gradients) have bfloat16 operands."""
    return _product(equation, x, y)


def _forward(equation: str, x: Array, y: Array):
    return _product(equation, x, y), (x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))  # half the bytes until then


def _backward(equation: str, operands: tuple[Array, Array], g: Array):
    (x, y), (inputs, out) = operands, equation.split("->")
    a, b = inputs.split(",")
    return _product(f"{out},{b}->{a}", g, y), _product(f"{a},{out}->{b}", x, g)


einsum.defvjp(_forward, _backward)


def _replace_product(call, args, kwargs, context):
    """Replaces the product of a bias-free `Linear`; everything else is unchanged."""
    # The shipped model knows nothing of training, so its products are replaced from outside.
    layer = context.module
    if not isinstance(layer, Linear) or context.method_name != "__call__" or layer.bias:
        return call(*args, **kwargs)
    (x,), n = args, layer.contract
    size = math.prod(layer.shape[:n])
    y = einsum("ti,io->to", x.reshape(-1, size), layer.get_variable("params", "kernel").reshape(size, -1))
    return y.reshape(*x.shape[: x.ndim - n], *layer.shape[n:])


def mixed_precision():
    """A context manager under which the linear maps of a module's `apply` run in mixed precision."""
    return nn.intercept_methods(_replace_product)
