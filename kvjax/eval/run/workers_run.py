"""A run whose cells workers do, in any order, and whose records this process writes in the order of one process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from rich.progress import Progress

from kvjax.cache.protocol import KVMethod
from kvjax.eval.run.cells import Cell
from kvjax.eval.run.ray_workers import RayWorkers
from kvjax.eval.run.store import Store
from kvjax.eval.run.time_estimate import ANNOUNCED_FRACTION, SHORTEST_SECONDS, format_seconds
from kvjax.utils import display

MAX_LINES = 16  # workers that have a line below the bar


class OrderedWriter:
    """Writes the records of cells and methods in the order of the work, whatever the order in which they come.

    Those whose turn has not come are kept in the store as early ones, so that a run that is killed loses none.

    Args:
      store: the records.
      work: cells and methods that the store lacks records of, in order.
    """

    def __init__(self, store: Store, work: Sequence[tuple[Cell, str]]):
        self._store, self._work, self._turn = store, work, 0
        self._write_early()

    def lacks(self, cell: Cell, method: str) -> bool:
        """Whether records of a cell and a method are still to come."""
        is_written = all(self._store.find(method, c.task, c.key) for c in cell.batch.cases)
        return not is_written and not all(self._store.find_early(method, c.task, c.key) for c in cell.batch.cases)

    def write(self, cell: Cell, method: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Writes the records of a cell and a method, and those that have waited for them."""
        next_cell, next_method = self._work[self._turn]
        if (next_cell.index, next_method) == (cell.index, method):
            self._store.append(records)
            self._turn += 1
            self._write_early()
        else:
            self._store.append_early(records)

    def _write_early(self) -> None:
        while self._turn < len(self._work):
            cell, method = self._work[self._turn]
            found = [self._store.find_early(method, c.task, c.key) for c in cell.batch.cases]
            records = [record for record in found if record is not None]
            if len(records) < len(found):
                return
            self._store.append(records)
            self._turn += 1
        self._store.remove_early()


def run_on_workers(
    workers: RayWorkers,
    methods: Mapping[str, KVMethod],
    hashes: Mapping[str, str],
    cells: Sequence[Cell],
    store: Store,
    shape: Callable[[Cell], Hashable],
    *,
    question_aware: bool,
    seed: int,
    progress: Progress | None,
    announce: Callable[[str], None] | None,
    other_seconds: float,
) -> None:
    """Runs the cells that a store lacks records of; the arguments are those of `evaluate` and of `RayWorkers.run`."""
    writer = OrderedWriter(store, [(cell, name) for cell in cells for name in cell.methods])
    lacking = [(cell, tuple(name for name in cell.methods if writer.lacks(cell, name))) for cell in cells]
    todo = [dataclasses.replace(cell, methods=names) for cell, names in lacking if names]
    num_cases = sum(len(cell.batch.cases) * len(cell.methods) for cell in todo)
    start, num_done, is_announced = time.perf_counter(), 0, False
    with Progress(disable=True) if progress is None else progress as bar:
        total = bar.add_task("all", total=num_cases, left="")
        lines = [bar.add_task(f"worker {i + 1}", total=None, left="") for i in range(min(len(workers), MAX_LINES))]

        def show(worker: int, doing: str, done: int, of: int) -> None:
            if worker < len(lines):
                description = f"worker {worker + 1}" + (f", {doing}" if doing else "")
                bar.update(lines[worker], description=description, completed=done, total=of)

        def report(cell: Cell, method: str, records: list[dict[str, Any]]) -> None:
            nonlocal num_done, is_announced
            writer.write(cell, method, records)
            num_done += len(cell.batch.cases)
            seconds = time.perf_counter() - start
            left = seconds * (num_cases - num_done) / num_done
            bar.update(total, left=f"about {format_seconds(left)} left" if num_done < num_cases else "")
            bar.advance(total, len(cell.batch.cases))
            whole = other_seconds + seconds + left
            is_known = ANNOUNCED_FRACTION * num_cases < num_done < num_cases
            if announce is not None and not is_announced and is_known and whole >= SHORTEST_SECONDS:
                announce(
                    f"about {format_seconds(whole)} in all, of which {format_seconds(other_seconds + seconds)} have "
                    f"passed, for {display.count(num_cases, 'answer')} on {display.count(len(workers), 'worker')}"
                )
                is_announced = True

        options = {"question_aware": question_aware, "seed": seed}
        workers.run(todo, methods, hashes, shape, report, show, **options)
        for line in lines:
            bar.remove_task(line)
