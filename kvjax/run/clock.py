"""Running compiled programs: how long that takes, compilation apart, and what is said when memory runs out."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax

from kvjax.core.program import Program
from kvjax.core.types import KvjaxError


@dataclasses.dataclass
class Clock:
    """Seconds of wall-clock time, those spent compiling apart."""

    compiling: float = 0.0
    running: float = 0.0

    def call(self, program: Program, **arguments: Any) -> Any:
        """Runs a program, and waits for what it gives."""
        with self.timed():
            return jax.block_until_ready(self.start(program, **arguments))

    def start(self, program: Program, **arguments: Any) -> Any:
        """Runs a program without waiting, inside `timed`."""
        return self.compiled(program, **arguments)(**program.traced(arguments))

    def compiled(self, program: Program, **arguments: Any) -> Any:
        """The executable, which takes the arguments that are not static."""
        executable, seconds = program.compile(**arguments)
        self.compiling += seconds
        return executable

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """What runs inside, compiling apart, counts; its results must have been waited for when it ends."""
        start, compiled_before = time.perf_counter(), self.compiling
        try:
            yield
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            raise KvjaxError(
                f"there is not enough memory ({e}); give fewer or shorter prompts at a time, ask for fewer new tokens, "
                "or use a method that holds less"
            ) from e
        self.running += time.perf_counter() - start - (self.compiling - compiled_before)
