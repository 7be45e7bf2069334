"""Measurements that need a process of their own, because the peak of a process never falls."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak_bytes() -> int:
    """The most memory that this process has held so far."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage tells includes the process that started this one
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if "VmHWM" in line)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Killed(SystemExit):
    """A process that a signal ended, as an abort in a compiler does."""


def alone(fun: Callable[..., Any], *args: Any) -> Any:
    """What a function of a module returns, run in a new process; ends this one with a message where that one fails.

    Raises Killed where a signal ended that one.
    """
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
