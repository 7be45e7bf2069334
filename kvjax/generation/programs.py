"""Programs of the engine's functions: compiled with options and donated buffers, and timed without their compilation.

JAX allows options and donation in the outermost `jit` alone, so `kvjax.engine` and `kvjax.functional` go without. Only
`kvjax.generation`, which is never traced, calls these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format

from kvjax.core import compile_cache, matmul, memory
from kvjax.engine import forward
from kvjax.engine.forward import Target
from kvjax.errors import KvjaxError
from kvjax.models.model import Model
from kvjax.processes import lost_process

Options = tuple[tuple[str, str], ...]
_COMPILE_EVENTS = {
    f"/jax/core/compile/{step}_duration" for step in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
}
_MANY_PROGRAMS = 64  # compiled programs after which the memory mappings of the process are counted again


def target_for(model: Model, num_tokens: int, *, in_place: bool, num_logits: int | None = None) -> Target:
    """Returns the target of a pass: a model's configuration and mesh, and the functions compiled for it.

    Args:
      model: whose weights are multiplied.
      num_tokens: tokens of all sequences in one pass.
      in_place: whether each layer's state and hidden vectors are donated.
      num_logits: tokens whose logits are computed; None for all.
    """
    width, dtype, tied = model.config.width, model.dtype, model.config.tie_embeddings
    options = options_for(num_tokens, width, dtype)
    run_layer, run_selecting_layer = (
        jit_with(forward.apply_layer, ("call", "target"), donated if in_place else (), options)
        for donated in (("state", "hidden"), ("state",))
    )
    options = options_for(num_tokens if num_logits is None else num_logits, width, dtype, tied)
    unembed = jit_with(forward.apply_unembed, ("target",), (), options)
    return Target(model.config, model.auto_mesh, run_layer, unembed, run_selecting_layer)


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


class _CompileClock(threading.local):
    """The compiler's time in this thread, as JAX reports it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_programs = 0
        self.spans: list[tuple[float, float]] = []  # disjoint (start, seconds) since the last `timed`

    def record(self, event: str, duration_secs: float, **_: Any) -> None:
        """Adds an event of `jax.monitoring`."""
        if event not in _COMPILE_EVENTS:
            return
        start = time.perf_counter() - duration_secs
        # A function is traced within the tracing of its caller, and reported before it: only the outer one counts.
        while self.spans and self.spans[-1][0] >= start:
            self.seconds -= self.spans.pop()[1]
        self.spans.append((start, duration_secs))
        self.seconds += duration_secs
        self.num_programs += event.endswith("backend_compile_duration")


_compile_clock = _CompileClock()
jax.monitoring.register_event_duration_secs_listener(_compile_clock.record)


@dataclasses.dataclass
class Timer:
    """Adds up the seconds of what runs inside `timed`."""

    compile_seconds: float = 0.0
    run_seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Times the block inside, which must wait for its results; compilation is counted separately.

        Raises KvjaxError, with the remedy, where memory runs out, where JAX is set to 64 bits, and where another
        process of the run is lost (ProcessLost).
        """
        if jax.config.values["jax_enable_x64"]:
            raise KvjaxError(
                "kvjax computes in 32 bits, and JAX_ENABLE_X64 is set: unset it, or call kvjax within "
                "`with jax.enable_x64(False):`"
            )
        if _compile_clock.num_programs >= _MANY_PROGRAMS:
            _compile_clock.num_programs = 0
            compile_cache.clear_if_many()
        # No compilation from here on is nested in an earlier one.
        _compile_clock.spans.clear()
        start, compiled_before = time.perf_counter(), _compile_clock.seconds
        try:
            yield
        except KvjaxError:
            raise
        except (jax.errors.JaxRuntimeError, ValueError) as e:  # the latter where JAX's dispatch meets a lost connection
            if (lost := lost_process(e)) is not None:
                raise lost from e
            # The allocator names its error in one way, and a computation whose result does not fit in another.
            if "RESOURCE_EXHAUSTED" not in str(e) and "Out of memory" not in str(e):
                raise
            raise KvjaxError(
                f"there is not enough memory ({e}); give fewer or shorter prompts at a time, ask for fewer new tokens, "
                "or use a method that holds less"
            ) from e
        compiling = _compile_clock.seconds - compiled_before
        self.compile_seconds += compiling
        self.run_seconds += max(0.0, time.perf_counter() - start - compiling)
