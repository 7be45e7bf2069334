"""How a run says how far it is: bars on a terminal, one line in a notebook, nothing elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Left

from kvjax.utils.display import StatusLine


def bars() -> Progress:
    """Bars on stderr with the time left: of everything, and of the present method and task."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, Left(compact=True), console=Console(stderr=True), speed_estimate_period=600)


def fitting(visible: bool | None) -> Progress:
    """What suits the place: None is shown to whoever watches, a terminal or a notebook."""
    console = Console(stderr=True)
    if visible is False or (visible is None and not (console.is_terminal or console.is_jupyter)):
        return Progress(disable=True)
    return bars() if console.is_terminal and not console.is_jupyter else LineProgress()


class LineProgress(Progress):
    """One line in place of bars, which need ipywidgets in a notebook."""

    def __init__(self) -> None:
        super().__init__(disable=True)
        self._line, self._began = StatusLine(True), time.perf_counter()

    def add_task(self, description: str, *args: Any, **more: Any) -> TaskID:
        """Says what has begun."""
        task = super().add_task(description, *args, **more)
        self._say(description)
        return task

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Says how far everything is."""
        super().advance(task_id, advance)
        self._say(self.tasks[-1].description)

    def stop(self) -> None:
        """Takes the line away."""
        self._line.__exit__()
        super().stop()

    def _say(self, description: str) -> None:
        # The first task is that of everything.
        done, total = self.tasks[0].completed, self.tasks[0].total or 0
        self._line.say(f"{done:.0f} of {total:.0f}, {time.perf_counter() - self._began:.0f} s: {description}")
