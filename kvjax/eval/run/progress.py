"""What whoever waits for a run sees: bars with the time left, and lines about the rows that are finished."""

from __future__ import annotations

import datetime
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvjax.eval.page import summary
from kvjax.eval.run.cells import Cell
from kvjax.eval.run.store import Store
from kvjax.utils import display
from kvjax.utils.display import StatusLine

MAX_NAMED_METHODS = 6  # more are counted


def bars() -> Progress:
    """Returns bars on stderr: of everything, with the time left, and of the present method and task."""
    description = TextColumn("{task.description}")
    columns = (description, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    # A cell may take longer than any shorter period, so that the speed is the mean of the whole run.
    return Progress(*columns, console=Console(stderr=True), speed_estimate_period=math.inf)


def make_progress(is_visible: bool | None) -> Progress:
    """Returns the progress that suits the place; None shows it only on a terminal or in a notebook."""
    console = Console(stderr=True)
    if is_visible is False or (is_visible is None and not (console.is_terminal or console.is_jupyter)):
        return Progress(disable=True)
    return bars() if console.is_terminal and not console.is_jupyter else LineProgress()


class LineProgress(Progress):
    """One line in place of bars, which need ipywidgets in a notebook."""

    def __init__(self) -> None:
        super().__init__(disable=True, speed_estimate_period=math.inf)
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
        whole = self.tasks[0]  # the first task is that of the whole run
        left = f", {datetime.timedelta(seconds=round(whole.time_remaining))} left" if whole.time_remaining else ""
        seconds = time.perf_counter() - self._start_seconds
        self._line.say(f"{whole.percentage:.0f}%, {seconds:.0f} s{left}: {description}")


class AnnouncedRows:
    """Says each row of the table after its first batch, and again once all its cases have records.

    Methods take a batch one after the other, so that all rows are finished near the end; the first batch of each says
    early how it will go. Rows that were whole before are not said.

    Args:
      store: the records, in which the rows are looked up.
      cells: the run's work.
      announce: called with a line for each row.
    """

    def __init__(self, store: Store, cells: Sequence[Cell], announce: Callable[[str], None]):
        self._store, self._announce = store, announce
        self._num_missing = Counter(
            (name, case.task, case.about.get("length"))
            for cell in cells
            for name in cell.methods
            for case in cell.batch.cases
            if store.find(name, case.task, case.key) is None
        )
        self._begun = {(r["method"], r["task"], summary.length_of(r)) for r in store.records}

    def note(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Takes the records of a batch that the store has been given."""
        given = Counter((r["method"], r["task"], summary.length_of(r)) for r in records)
        for row, count in given.items():
            method, task, length = row
            self._num_missing[row] -= count
            if self._num_missing[row] == 0 or row not in self._begun:
                # The exact cache's records are what text is compared with.
                own = (r for r in self._store.records if (r["task"], summary.length_of(r)) == (task, length))
                rows = summary.rows(r for r in own if r["method"] in (method, summary.REFERENCE))
                line = next(summary.describe_row(r) for r in rows if r["method"] == method)
                self._announce(line + (" so far" if self._num_missing[row] else ""))
            self._begun.add(row)


def describe_earlier(out: str | Path, records: Sequence[Mapping[str, Any]]) -> str:
    """Says what a folder held before a run, and how to start anew."""
    methods, tasks = (summary.distinct_values(records, field) for field in ("method", "task"))
    lengths = sorted({n for r in records if (n := summary.length_of(r)) is not None})
    at = f" at {', '.join(f'{n:,}' for n in lengths)} tokens" if lengths else ""
    shown = "; ".join(methods) if len(methods) <= MAX_NAMED_METHODS else display.count(len(methods), "method")
    held = f"{display.count(len(records), 'record')} of {shown} on {', '.join(tasks)}{at}"
    return (
        f"{out} already holds {held}; this run adds to them, and its table has them all. To start anew, choose another "
        "folder or delete this one"
    )
