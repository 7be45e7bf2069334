"""Differentiation rules at the border between numbers and bits: no gradient is lost there silently."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Float

from kvjax.core.types import Array
from kvjax.errors import GradientThroughBits


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def refuse_gradient(x: Array, holder: str) -> Array:
    """Returns x, and raises if a gradient would pass: for numbers that are about to become bits.

    Integers have no tangent, so differentiation stops at them silently and gives a wrong gradient. Indices that select
    tokens need no such guard: they do not encode a value. Numbers that only select may pass `lax.stop_gradient`.

    Args:
      x: numbers that become codes, raw bits or words next.
      holder: name of the result in the error, as "codes of Kivi".

    Returns:
      x.

    Raises:
      GradientThroughBits: when x is differentiated; a constant passes, also inside a scan.
    """
    return x


@functools.partial(refuse_gradient.defjvp, symbolic_zeros=True)
def _refuse(holder: str, primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Any]:
    (x,), (tangent,) = primals, tangents
    # Symbolic zeros tell a constant from a number that is differentiated: without them both have an array as tangent.
    if isinstance(tangent, SymbolicZero):
        return x, tangent
    raise GradientThroughBits(holder)


@jax.custom_jvp
def with_gradient_of(value: Float[Array, "*rest"], exact: Float[Array, "*rest"]) -> Float[Array, "*rest"]:
    """Returns `value` with the gradient of `exact`, an array of its shape and dtype (straight-through estimator)."""
    return value


# The familiar exact + stop_gradient(value - exact) rounds twice, and would not return `value` itself.
with_gradient_of.defjvp(lambda primals, tangents: (primals[0], tangents[1]))
