"""Bytes and kept tokens, read off the state."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kvjax import memory
from kvjax.kv.state import State


def state_bytes(state: Any) -> dict[str, int]:
    """Any pytree of arrays or abstract values -> {"device": bytes, "pinned_host": bytes}."""
    total = {"device": 0, "pinned_host": 0}
    for x in jax.tree.leaves(state):
        total[memory.kind(x)] += x.size * x.dtype.itemsize
    return total


def kept_positions(state: State) -> list[list[list[np.ndarray]]]:
    """[layer][row][key/value head]: the positions, ascending, of the tokens whose keys and values the state holds."""
    pos = [np.asarray(s.positions() if hasattr(s, "positions") else s.pos) for s in state.layers]
    heads = max(p.shape[1] for p in pos)

    def layer(p):
        p = np.broadcast_to(p, (p.shape[0], heads, p.shape[2]))
        return [[np.sort(head[head >= 0]) for head in row] for row in p]

    return [layer(p) for p in pos]
