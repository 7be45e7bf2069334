"""Contexts for evaluation: a batch that many methods are asked about goes through the model once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from kvjax import processes
from kvjax.cache.protocol import KVMethod
from kvjax.core import memory
from kvjax.core.mesh import is_shared
from kvjax.generation.context import Context, read
from kvjax.generation.inputs import round_up
from kvjax.generation.model_calls import model_for
from kvjax.models.model import Model
from kvjax.reuse.full_kv import FullKV, read_exactly

EXACT_MEMORY_FRACTION = 1 / 8
"""The part of the installed memory that exact keys, values and queries may take."""


def padded_width(num_tokens: int) -> int:
    """Returns the width that `num_tokens` tokens are padded to: few widths share programs, and are little too wide."""
    return num_tokens if num_tokens <= 16 else round_up(num_tokens, 1 << max(4, num_tokens.bit_length() - 6))


class ContextReader:
    """Reads contexts under methods; the exact keys, values and queries of the latest ones are kept for other methods.

    Contexts whose exact tensors are too large to be kept are read anew under each method, and so are those of a model
    whose layers do not all have keys and values of their own: a recurrence has a state, and shared layers have none.

    Args:
      model: the model.
      least_headroom_tokens: tokens that every context has room for, whatever is asked for.
    """

    def __init__(self, model: Model, least_headroom_tokens: int = 0):
        self.model, self._least_headroom_tokens = model, least_headroom_tokens
        self._exact: dict[tuple, FullKV] = {}  # the latest last
        self._most_bytes: float | None = None  # that they may take; found at the first read

    def read(
        self, contexts: Sequence[np.ndarray], method: str | KVMethod, *, headroom_tokens: int, width: int | None = None
    ) -> Context:
        """Reads contexts as `kvjax.read` does; the default width is the `padded_width` of the longest one."""
        width = round_up(padded_width(max(map(len, contexts))) if width is None else width)
        headroom_tokens = max(headroom_tokens, self._least_headroom_tokens)
        ids = [np.asarray(context).tolist() for context in contexts]
        model = model_for(self.model, ids, max(map(len, ids)) + headroom_tokens)
        most = self._most_bytes = self._max_exact_bytes() if self._most_bytes is None else self._most_bytes
        if not model.config.has_own_caches or self._exact_bytes(len(contexts), width) > most:
            return read(model, contexts, method, headroom=headroom_tokens, width=width)
        key = width, tuple(map(tuple, ids)), model.config
        if key not in self._exact:
            # The oldest ones go before the new one is made, so that both never exceed the limit together.
            while self._exact and sum(self._exact_bytes(len(kept), w) for w, kept, _ in [*self._exact, key]) > most:
                del self._exact[next(iter(self._exact))]
            self._exact[key] = read_exactly(model, ids, width=width)
        capacity = max(round_up(max(map(len, ids)) + headroom_tokens), width)
        return self._exact[key].compress(method, capacity=capacity)

    def _max_exact_bytes(self) -> float:
        installed = memory.installed_memory(jax.tree.leaves(self.model.params)[0].devices()).device
        most = EXACT_MEMORY_FRACTION * (math.inf if installed is None else installed)
        # Machines differ a little, and processes that share a mesh must do the same.
        return min(processes.gather(most)) if is_shared(self.model.mesh) else most

    def _exact_bytes(self, batch: int, width: int) -> int:
        """Bytes of the exact keys, values and queries of all layers."""
        c = self.model.config
        attention = [c.kind(i).attention for i in range(c.layers)]
        numbers = sum(a.kv_heads * (a.head_dim + a.value_dim) + a.heads * a.head_dim for a in attention)
        return batch * width * numbers * self.model.dtype.itemsize
