"""The cells that wait for a worker, and which of them a worker takes next."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable

from kvjax.eval.run.cells import Cell


class CellQueue:
    """Hands cells of one shape to one worker, whose programs are then compiled once, as long as others have work too.

    A worker takes a cell of a shape that it has run already. Where none is left it takes the first of a shape that no
    worker has; and where every shape has a worker, it steals from the shape with the most waiting cells.

    Args:
      cells: the cells, in the order of their records.
      shape: what the programs of a cell are compiled for.
    """

    def __init__(self, cells: Iterable[Cell], shape: Callable[[Cell], Hashable]):
        self._shape = shape
        self._waiting: dict[Hashable, list[Cell]] = collections.defaultdict(list)
        self._shapes_of: dict[Hashable, set[Hashable]] = collections.defaultdict(set)  # by worker
        for cell in cells:
            self._waiting[shape(cell)].append(cell)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def take(self, worker: Hashable) -> Cell | None:
        """Removes the next cell of a worker, and returns it; None if no cell waits."""
        waiting = {shape: cells for shape, cells in self._waiting.items() if cells}
        if not waiting:
            return None
        own = self._shapes_of[worker]
        others = set().union(*(shapes for other, shapes in self._shapes_of.items() if other != worker))

        def first_index(shape: Hashable) -> int:
            return waiting[shape][0].index

        mine, free = [s for s in waiting if s in own], [s for s in waiting if s not in others]
        if mine or free:
            # The earliest one, so that few records wait for those before them.
            shape = min(mine or free, key=first_index)
        else:
            shape = max(waiting, key=lambda s: (len(waiting[s]), -first_index(s)))
        own.add(shape)
        return waiting[shape].pop(0)

    def put_back(self, cell: Cell) -> None:
        """Puts a cell back, whose worker died, in the place that it had."""
        cells = self._waiting[self._shape(cell)]
        cells.append(cell)
        cells.sort(key=lambda c: c.index)

    def forget_worker(self, worker: Hashable) -> None:
        """Frees the shapes of a worker that has died, and whose programs died with it."""
        self._shapes_of.pop(worker, None)
