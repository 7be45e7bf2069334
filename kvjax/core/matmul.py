"""Matrix products in the form that the backend multiplies fastest; what they give is the same up to rounding."""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.types import Array

FEW = 64
"""Rows up to which XLA's CPU backend multiplies narrow numbers several times faster when it sums in float32."""
LARGE = 2**19
"""Numbers in a float32 matrix from which multiplying one row with parts of it, side by side, is worth it."""
PARTS = 2 ** (max(4, os.cpu_count() or 1).bit_length() - 1)
"""Parts at most; more than two cores have, so that the last one to be done is done sooner."""
PACKED_IN_VAIN = range(4, 33)
"""Rows for which packing the weights in every product, as XLA's CPU backend does, takes longer than it saves."""
WITHOUT_PACKING = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""The compiler's option by which that backend leaves such products to other code than YNNPACK."""


def matmul(x: Array, w: Array) -> Array:
    """x [T in], w [in out] -> [T out] in x's dtype."""
    if _few_and_narrow(x):
        return _summed(x, w, (((1,), (0,)), ((), ()))).astype(x.dtype)
    if len(x) == 1 and x.dtype == jnp.float32 and w.size >= LARGE and jax.default_backend() == "cpu":
        return _in_parts(x, w)
    if jax.default_backend() == "gpu":
        return (_pad_single_row(x) @ w)[: len(x)]
    return x @ w


def unembed(x: Array, rows: Array) -> Array:
    """x [T D], rows [V D] -> dot products f32[T V]."""
    dims = (((1,), (1,)), ((), ()))
    if not _few_and_narrow(x):
        return lax.dot_general(x, rows, dims).astype(jnp.float32)
    return _summed(x, rows, dims)


def compiler_options(rows: int, width: int, dtype: Any, tied: bool = False) -> dict[str, str]:
    """Of a program that multiplies x [rows width] of a dtype with weights, what XLA's compiler is to be told.

    Several rows go to YNNPACK, which packs the weights anew each time, unless that is turned off. tied: the program
    multiplies with rows of an embedding too, and YNNPACK alone is fast at that.
    """
    wide = width >= 768 and not tied  # packing smaller weights costs less, as they stay in the processor's caches
    in_vain = dtype == jnp.float32 and rows in PACKED_IN_VAIN and wide
    return dict(WITHOUT_PACKING) if in_vain and jax.default_backend() == "cpu" else {}


def _in_parts(x: Array, w: Array) -> Array:
    """x [1 in], w [in out] -> [1 out], summed over parts of the contraction, as XLA's CPU code leaves cores idle."""
    parts = math.gcd(w.shape[0], PARTS)
    x, w = x.reshape(parts, 1, -1), w.reshape(parts, -1, w.shape[1])
    return lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,)))).sum(0)


def _few_and_narrow(x: Array) -> bool:
    return x.shape[0] <= FEW and x.dtype.itemsize < 4 and jax.default_backend() == "cpu"


def _summed(x: Array, w: Array, dims: lax.DotDimensionNumbers) -> Array:
    """A product with sums in float32."""
    return lax.dot_general(_pad_single_row(x), w, dims, preferred_element_type=jnp.float32)[: len(x)]


def _pad_single_row(x: Array) -> Array:
    """x [T D], with an empty row behind a single one.

    XLA's CPU code for a single row of narrow numbers is slow, and its GPU code writes every product of a weight with
    its factor to memory and reads them all again to add them up: three times the bytes of the weights.
    """
    return jnp.pad(x, ((0, 1), (0, 0))) if len(x) == 1 else x
