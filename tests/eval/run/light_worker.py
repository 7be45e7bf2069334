"""A worker that imports nothing of kvjax, so that Ray starts it in a moment: it runs no model, and dies on demand."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


class LightWorker:
    """Stands in for `ray_workers.Worker`; the methods of its cells say what it does."""

    def __init__(self, kind: str, sharers: int, directory: str, setup: Any):
        self._setup = setup

    def process_id(self) -> int:
        return os.getpid()

    def load(self) -> dict[str, Any]:
        with open(self._setup["started"], "ab", buffering=0) as f:
            f.write(b"x")
            place = f.tell()  # the file's size could be that after other workers have written
        return {"equal": {"device": self._setup["devices"][place % 2]}, "machine": {}}

    def run(self, run: Any, cell: Any) -> tuple[int, list[Any], list[str]]:
        (method,) = cell.methods
        with open(cell.tries, "a") as f:
            f.write("x")
        if method == "dies" or (method == "dies once" and os.path.getsize(cell.tries) == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        while method == "waits" and not os.path.exists(cell.gate):
            time.sleep(0.05)
        fails = method == "fails"
        return cell.index, [] if fails else [method], ["a method fails"] if fails else []
