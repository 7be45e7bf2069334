"""Measurements in a process of their own: the peak memory of a process never falls, and a compiler can abort it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ABORT = re.compile(r"F\d{4} [\d:.]+ +\d+ (.*)")  # how Google's libraries log what ends a process: time, thread, message


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


def iterate_in_process(fun: Callable[..., Iterator[Any]], *args: Any, seconds: float) -> Iterator[Any]:
    """Runs a module's generator in a new process and yields what it yields, each item as soon as it is there.

    Raises:
      Killed: if the process ended otherwise than by returning, or took more than `seconds`; the message has the last
        line that it wrote to stderr.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        reader, writer = spawn.Pipe(duplex=False)
        # The process inherits this one's stderr as it is at the start.
        with _redirected_stderr(stderr.fileno()):
            process = spawn.Process(target=_send_items, args=(writer, fun, args))
            process.start()
        writer.close()
        end = time.monotonic() + seconds
        try:
            while reader.poll(max(end - time.monotonic(), 0)):
                yield reader.recv()
            raise Killed(f"it took more than {seconds:.0f} s")
        except EOFError:
            process.join()
        finally:
            process.kill()
            process.join()
        if process.exitcode:
            stderr.seek(0)
            lines = [line for line in stderr.read().splitlines() if line.strip() and not line.startswith("    @")]
            # An abort writes what failed first, and then a long trace.
            aborts = [found[1] for line in lines if (found := ABORT.match(line))]
            message = (aborts or lines[-1:] or ["it wrote nothing"])[0].strip()
            raise Killed(f"the process ended with status {process.exitcode}: {message}")


@contextlib.contextmanager
def _redirected_stderr(file: int) -> Iterator[None]:
    kept = os.dup(2)
    try:
        os.dup2(file, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _send_items(writer: Any, fun: Callable[..., Iterator[Any]], args: tuple[Any, ...]) -> None:
    for item in fun(*args):
        writer.send(item)
    writer.close()
