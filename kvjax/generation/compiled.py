"""The engine's functions with compiler options and donated buffers.

JAX allows both in the outermost `jit` alone, so `kvjax.engine` and `kvjax.functional` go without. Only
`kvjax.generation`, which is never traced, calls these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.core import matmul
from kvjax.engine import forward
from kvjax.engine.forward import Compiled
from kvjax.models.model import Model

Options = tuple[tuple[str, str], ...]


def compiled_for(model: Model, num_tokens: int, *, in_place: bool, logits_of: int | None = None) -> Compiled:
    """The functions that run a layer and make logits.

    Args:
      model: whose weights are multiplied.
      num_tokens: of all sequences, in one pass.
      in_place: each layer's state is donated.
      logits_of: tokens whose logits are made; default all.
    """
    width, dtype, tied = model.config.width, model.dtype, model.config.tie_embeddings
    run_layer = jit_with(
        forward.apply_layer,
        static=("call", "target"),
        donate=("state",) if in_place else (),
        options=options_for(num_tokens, width, dtype),
    )
    num_tokens = num_tokens if logits_of is None else logits_of
    unembed = jit_with(forward.apply_unembed, static=("target",), options=options_for(num_tokens, width, dtype, tied))
    return Compiled(run_layer, unembed)


def jit_with(
    fun: Callable[..., Any], static: tuple[str, ...] = (), donate: tuple[str, ...] = (), options: Options = ()
) -> Any:
    """`jax.jit`, once for each set of arguments."""
    return _jit(fun, static, donate, options)


@functools.cache
def _jit(fun: Callable[..., Any], static: tuple[str, ...], donate: tuple[str, ...], options: Options) -> Any:
    return jax.jit(fun, static_argnames=static, donate_argnames=donate, compiler_options=dict(options) or None)


def options_for(num_tokens: int, width: int, dtype: Any, tied: bool = False) -> Options:
    """The options for a program that multiplies `num_tokens` tokens with weights, as far as the compiler knows them."""
    return _known(tuple(matmul.compiler_options(num_tokens, width, dtype, tied).items()))


@functools.cache
def _known(options: Options) -> Options:
    """The options, or none of them where this version of the compiler does not know one."""
    try:
        if options:
            jax.jit(jnp.negative, compiler_options=dict(options)).lower(jnp.zeros(1)).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return ()
    return options
