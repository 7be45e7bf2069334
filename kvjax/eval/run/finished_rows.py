"""The rows of a run's table as they are finished, and what a run's folder held before: lines for whoever waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.eval.page import summary
from kvjax.eval.run.cells import Cell
from kvjax.eval.run.store import Store
from kvjax.utils import display

MOST_METHODS = 6  # that are named; more are counted


class FinishedRows:
    """Says each row of the table as soon as all its cases have records; rows that were whole before are not said.

    Args:
      store: the records, in which the rows are looked up.
      cells: the run's work.
      announce: called with a line for each row.
    """

    def __init__(self, store: Store, cells: Sequence[Cell], announce: Callable[[str], None]):
        self._store, self._announce = store, announce
        self._lacking = Counter(
            (name, case.task, case.about.get("length"))
            for cell in cells
            for name in cell.methods
            for case in cell.batch.cases
            if store.find(name, case.task, case.key) is None
        )

    def note(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Takes records that the store has been given."""
        for record in records:
            row = method, task, length = record["method"], record["task"], summary.length_of(record)
            self._lacking[row] -= 1
            if self._lacking[row] == 0:
                # The exact cache's records are what text is compared with.
                own = (r for r in self._store.records if (r["task"], summary.length_of(r)) == (task, length))
                rows = summary.rows(r for r in own if r["method"] in (method, summary.REFERENCE))
                self._announce(next(summary.describe_row(r) for r in rows if r["method"] == method))


def describe_earlier(out: str | Path, records: Sequence[Mapping[str, Any]]) -> str:
    """Says what a folder held before a run, and how to start anew."""
    methods, tasks = (summary.distinct_values(records, field) for field in ("method", "task"))
    lengths = sorted({n for r in records if (n := summary.length_of(r)) is not None})
    at = f" at {', '.join(f'{n:,}' for n in lengths)} tokens" if lengths else ""
    shown = "; ".join(methods) if len(methods) <= MOST_METHODS else display.count(len(methods), "method")
    held = f"{display.count(len(records), 'record')} of {shown} on {', '.join(tasks)}{at}"
    return (
        f"{out} already holds {held}; this run adds to them, and its table has them all. To start anew, choose another "
        "folder or delete this one"
    )
