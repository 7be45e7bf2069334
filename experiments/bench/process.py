"""Measurements in a process of their own: the peak memory of a process never falls, and a compiler can abort it."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak_bytes() -> int:
    """Peak memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's figure includes the process that started this one
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if "VmHWM" in line)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Killed(SystemExit):
    """Raised when a signal ended the process, such as an abort in a compiler."""


def run_in_process(fun: Callable[..., Any], *args: Any) -> Any:
    """Runs a module's function in a new process and returns its result.

    Raises:
      Killed: if a signal ended the process.
      SystemExit: if the function failed, which ends this process with a message too.
    """
    # Not forked: XLA's threads would be missing in the child, and its memory would be the parent's.
    spawn = multiprocessing.get_context("spawn")
    answer = spawn.Queue()
    process = spawn.Process(target=_answer, args=(answer, fun, args))
    process.start()
    process.join()
    if process.exitcode:
        ended = Killed if process.exitcode < 0 else SystemExit
        raise ended(f"the process that ran {fun.__name__} ended with status {process.exitcode}")
    return answer.get()


def _answer(answer: Any, fun: Callable[..., Any], args: tuple[Any, ...]) -> None:
    answer.put(fun(*args))
