"""Marks for differentiation: no gradient passes through bits silently."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from kvjax.core.types import Array
from kvjax.errors import GradientThroughBits


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def refuse_gradient(x: Array, holder: str) -> Array:
    """Marks numbers that are about to become bits: the same numbers, but no gradient passes.

    Integers have no tangent, so that differentiation stops at them silently and gives a wrong number. Selections need
    no mark, since an index is no code of a value; what only selects may be given through `lax.stop_gradient`.

    Args:
      x: numbers that codes, raw bits or words are made of next.
      holder: what they become, for the error, as in "codes of Kivi".

    Returns:
      x.

    Raises:
      GradientThroughBits: when x is differentiated. A constant passes, also within a scan.
    """
    return x


@functools.partial(refuse_gradient.defjvp, symbolic_zeros=True)
def _refuse(holder: str, primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Any]:
    (x,), (tangent,) = primals, tangents
    if isinstance(tangent, SymbolicZero):
        return x, tangent
    raise GradientThroughBits(holder)


@jax.custom_jvp
def with_gradient_of(value: Array, exact: Array) -> Array:
    """`value`, bit for bit, with the gradient of `exact`, which has its shape and dtype."""
    return value


@with_gradient_of.defjvp
def _jvp_of_exact(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return primals[0], tangents[1]
