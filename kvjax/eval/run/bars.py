"""Progress of a run: bars on a terminal, one line in a notebook, nothing elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from kvjax.utils.display import StatusLine


def bars() -> Progress:
    """Returns bars on stderr: of everything, with the time left, and of the present method and task."""
    description, time_left = TextColumn("{task.description}"), TextColumn("{task.fields[left]}")
    columns = (description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), time_left)
    return Progress(*columns, console=Console(stderr=True))


def make_progress(is_visible: bool | None) -> Progress:
    """Returns the progress that suits the place; None shows it only on a terminal or in a notebook."""
    console = Console(stderr=True)
    if is_visible is False or (is_visible is None and not (console.is_terminal or console.is_jupyter)):
        return Progress(disable=True)
    return bars() if console.is_terminal and not console.is_jupyter else LineProgress()


class LineProgress(Progress):
    """One line in place of bars, which need ipywidgets in a notebook."""

    def __init__(self) -> None:
        super().__init__(disable=True)
        self._line, self._start_seconds = StatusLine(True), time.perf_counter()

    def add_task(self, description: str, *args: Any, **more: Any) -> TaskID:
        """Shows the task that begins."""
        task = super().add_task(description, *args, **more)
        self._show(description)
        return task

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Shows how far the whole run is."""
        super().advance(task_id, advance)
        self._show(self.tasks[-1].description)

    def stop(self) -> None:
        """Removes the line."""
        self._line.__exit__()
        super().stop()

    def _show(self, description: str) -> None:
        # The first task is that of the whole run.
        done, total = self.tasks[0].completed, self.tasks[0].total or 0
        seconds = time.perf_counter() - self._start_seconds
        left = self.tasks[0].fields.get("left")
        self._line.say(f"{done:.0f} of {total:.0f}, {seconds:.0f} s{left and f', {left}'}: {description}")
