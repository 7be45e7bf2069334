"""Computation in 32 bits, where a caller has set JAX to 64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

NARROWER = {"float64": np.float32, "complex128": np.complex64, "int64": np.int32, "uint64": np.uint32}


def computes_in_32_bits(call: Callable[P, R]) -> Callable[P, R]:
    """Decorates a call, so that under `jax_enable_x64` it computes as without, and returns the same 32-bit arrays.

    Arrays of 64 bits that it is given are narrowed. Functions that it is given run in 64 bits, as their author wrote
    them, and what they return is narrowed too.
    """

    def narrow(x: Any) -> Any:
        if isinstance(x, jax.Array | np.ndarray):
            # Keys of random numbers have a dtype of JAX's own.
            return x.astype(NARROWER[x.dtype.name]) if x.dtype.name in NARROWER else x
        if callable(x) and not isinstance(x, type):
            return run_in_64_bits(x)
        return x

    def run_in_64_bits(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with jax.enable_x64(True):
                return jax.tree.map(narrow, function(*args))

        return run

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not jax.config.values["jax_enable_x64"]:
            return call(*args, **kwargs)
        args, kwargs = jax.tree.map(narrow, (args, kwargs))
        with jax.enable_x64(False):
            return call(*args, **kwargs)

    return run
