"""The engine's functions, compiled with options for the matrix products and with donated buffers.

JAX allows both in the outermost `jit` alone, so `kvjax.engine` and `kvjax.functional` go without. Only
`kvjax.generation`, which is never traced, calls these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format

from kvjax.core import matmul, memory
from kvjax.engine import forward
from kvjax.engine.forward import Target
from kvjax.models.model import Model

Options = tuple[tuple[str, str], ...]


def target_for(model: Model, num_tokens: int, *, in_place: bool, num_logits: int | None = None) -> Target:
    """Returns the target of a pass: a model's configuration and mesh, and the functions compiled for it.

    Args:
      model: whose weights are multiplied.
      num_tokens: tokens of all sequences in one pass.
      in_place: whether each layer's state is donated.
      num_logits: tokens whose logits are computed; None for all.
    """
    width, dtype, tied = model.config.width, model.dtype, model.config.tie_embeddings
    donated = ("state",) if in_place else ()
    run_layer = jit_with(forward.apply_layer, ("call", "target"), donated, options_for(num_tokens, width, dtype))
    options = options_for(num_tokens if num_logits is None else num_logits, width, dtype, tied)
    unembed = jit_with(forward.apply_unembed, ("target",), (), options)
    return Target(model.config, model.auto_mesh, run_layer, unembed)


@functools.cache
def jit_with(
    fun: Callable[..., Any],
    static: tuple[str, ...],
    donated: tuple[str, ...],
    options: Options,
    formats: tuple[Format | None, ...] = (),
    structure: Any = None,
) -> Any:
    """Applies `jax.jit` with names of static and of donated arguments, once for each set of these values.

    `formats` are those of the result's leaves, `structure` is its tree; without formats all are the default ones.
    """
    return jax.jit(
        fun,
        static_argnames=static,
        donate_argnames=donated,
        compiler_options=dict(options) or None,
        out_shardings=jax.tree.unflatten(structure, formats) if formats else None,
    )


def jit_loop(loop: Callable[..., Any], state: Any, options: Options = ()) -> Any:
    """Applies `jax.jit` to a decode loop, to which the state is donated, and which returns it in the loop's formats.

    `state`, given for its formats and its structure, is to come from `memory.to_loop_formats`.
    """
    formats = memory.loop_formats(state)
    return jit_with(loop, ("target",), ("state",), options, formats, jax.tree.structure(state) if formats else None)


def options_for(num_tokens: int, width: int, dtype: Any, tied: bool = False) -> Options:
    """Returns the options for a program that multiplies `num_tokens` tokens with weights."""
    return _supported_options(tuple(matmul.compiler_options(num_tokens, width, dtype, tied).items()))


@functools.cache
def _supported_options(options: Options) -> Options:
    """Returns the options, or none of them where this version of XLA does not know one."""
    try:
        if options:
            jax.jit(jnp.negative, compiler_options=dict(options)).lower(jnp.zeros(1)).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return ()
    return options
