"""Wall-clock seconds with compilation apart, and the error where memory runs out."""

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

_COMPILE_EVENTS = {
    f"/jax/core/compile/{step}_duration" for step in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
}
_MANY_PROGRAMS = 64  # compiled since the process' memory mappings were last counted


class _Compiling(threading.local):
    """The compiler's time in this thread, as JAX reports it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_programs = 0
        self.spans: list[tuple[float, float]] = []  # start and seconds since the last `timed`, none within another

    def record(self, event: str, seconds: float, **_: Any) -> None:
        """Listens to `jax.monitoring`."""
        if event not in _COMPILE_EVENTS:
            return
        start = time.perf_counter() - seconds
        # A function is traced within the tracing of its caller, and reported before it: only the outer one counts.
        while self.spans and self.spans[-1][0] >= start:
            self.seconds -= self.spans.pop()[1]
        self.spans.append((start, seconds))
        self.seconds += seconds
        self.num_programs += event.endswith("backend_compile_duration")


_compiling = _Compiling()
jax.monitoring.register_event_duration_secs_listener(lambda *args, **kwargs: _compiling.record(*args, **kwargs))


@dataclasses.dataclass
class Timer:
    """Adds up the seconds of what runs inside `timed`."""

    compile_seconds: float = 0.0
    run_seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Times what runs inside, compilation apart; its results must have been waited for when it ends.

        Raises KvjaxError, with the remedy, where memory runs out, and where JAX is set to 64 bits.
        """
        if jax.config.values["jax_enable_x64"]:
            raise KvjaxError(
                "kvjax computes in 32 bits, and JAX_ENABLE_X64 is set: unset it, or call kvjax within "
                "`with jax.enable_x64(False):`"
            )
        if _compiling.num_programs >= _MANY_PROGRAMS:
            _compiling.num_programs = 0
            compile_cache.clear_if_many()
        # Whatever is compiled from here on lies within nothing earlier.
        _compiling.spans.clear()
        start, compiled_before = time.perf_counter(), _compiling.seconds
        try:
            yield
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            raise KvjaxError(
                f"there is not enough memory ({e}); give fewer or shorter prompts at a time, ask for fewer new tokens, "
                "or use a method that holds less"
            ) from e
        compiling = _compiling.seconds - compiled_before
        self.compile_seconds += compiling
        self.run_seconds += max(0.0, time.perf_counter() - start - compiling)
