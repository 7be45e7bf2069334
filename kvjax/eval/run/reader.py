"""Contexts for evaluation: a batch that many methods are asked about goes through the model once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from kvjax.cache.protocol import KVMethod
from kvjax.core import memory
from kvjax.generation.context import Context, read
from kvjax.generation.inputs import round_up
from kvjax.generation.reuse.full_kv import FullKV, read_exactly
from kvjax.models.model import Model

SHARE = 1 / 8
"""Of the memory that is installed, what exact keys, values and queries may take."""


class Reader:
    """Reads rows under methods; what the model makes of the latest rows is kept for the next methods.

    Of rows whose exact keys, values and queries of all layers are too large to be kept each method reads for itself.
    least_room: tokens that there is room for behind all rows, whatever is asked for.
    """

    def __init__(self, model: Model, least_room: int = 0):
        self.model, self._least_room = model, least_room
        self._kept: dict[tuple, FullKV] = {}  # the latest last

    def read(self, rows: Sequence[np.ndarray], method: str | KVMethod, *, room: int, width: int) -> Context:
        """As `kvjax.read`."""
        width, room, most = round_up(width), max(room, self._least_room), self._most()
        if self._size(len(rows), width) > most:
            return read(self.model, rows, method, room=room, width=width)
        ids = [np.asarray(row).tolist() for row in rows]
        what = width, tuple(map(tuple, ids))
        if what not in self._kept:
            while self._kept and sum(self._size(len(ids), width) for width, ids in [*self._kept, what]) > most:
                del self._kept[next(iter(self._kept))]
            self._kept[what] = read_exactly(self.model, ids, width=width)
        return self._kept[what].compress(method, max(round_up(max(map(len, ids)) + room), width))

    def _size(self, rows: int, width: int) -> int:
        """Bytes of what is kept of so many rows."""
        c = self.model.config
        return rows * width * c.layers * (2 * c.kv_heads + c.heads) * c.head_dim * self.model.dtype.itemsize

    def _most(self) -> float:
        there = memory.installed_memory(jax.tree.leaves(self.model.params)[0].devices()).device
        return SHARE * (math.inf if there is None else there)
