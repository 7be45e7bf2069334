"""Bytes, read off the state."""

from __future__ import annotations

from typing import Any

import jax

from kvjax import memory


def state_bytes(state: Any) -> dict[str, int]:
    """Any pytree of arrays or abstract values -> {"device": bytes, "pinned_host": bytes}."""
    total = {"device": 0, "pinned_host": 0}
    for x in jax.tree.leaves(state):
        total[memory.kind(x)] += x.size * x.dtype.itemsize
    return total
