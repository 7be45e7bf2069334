"""Bytes and kept tokens, read off the cache."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from kvjax.cache.contract import Cache
from kvjax.core import memory


def state_bytes(state: Any) -> dict[str, int]:
    """Any pytree of arrays or typed abstract values -> {"device": bytes, "pinned_host": bytes}."""
    total = {"device": 0, "pinned_host": 0}
    for x in jax.tree.leaves(state):
        total[memory.kind(x)] += x.size * x.dtype.itemsize
    return total


def kept_positions(cache: Cache) -> list[list[list[np.ndarray]]]:
    """[layer][row][key/value head]: the positions, ascending, of the tokens whose keys and values the cache holds."""
    cache.check_whole()

    def of_layer(layer: Any, state: Any) -> list[list[np.ndarray]]:
        pos = np.asarray(layer.positions(state))
        pos = np.broadcast_to(pos, (pos.shape[0], cache.config.kv_heads, pos.shape[2]))
        return [[np.sort(head[head >= 0]) for head in row] for row in pos]

    return [of_layer(layer, state) for layer, state in zip(cache.plan, cache.layers, strict=True)]
