"""Wall-clock seconds, compilation counted separately, and the error where memory runs out."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from kvjax.core import compile_cache
from kvjax.errors import KvjaxError
from kvjax.processes import lost_process

_COMPILE_EVENTS = {
    f"/jax/core/compile/{step}_duration" for step in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
}
_MANY_PROGRAMS = 64  # compiled programs after which the memory mappings of the process are counted again


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
