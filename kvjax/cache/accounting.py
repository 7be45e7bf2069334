"""Bytes and kept tokens, read off the state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.contract import State
from kvjax.core import memory
from kvjax.core.observe import Obs
from kvjax.core.types import Block
from kvjax.models.config import Config


def state_bytes(state: Any) -> dict[str, int]:
    """Any pytree of arrays or typed abstract values -> {"device": bytes, "pinned_host": bytes}."""
    total = {"device": 0, "pinned_host": 0}
    for x in jax.tree.leaves(state):
        total[memory.kind(x)] += x.size * x.dtype.itemsize
    return total


def planned_bytes(
    method: Any, config: Config, prompt: int, *, capacity: int | None = None, batch: int = 1, dtype: Any = jnp.bfloat16
) -> dict[str, int]:
    """`state_bytes` of the state that a prefill of `batch` prompts of so many tokens leaves, without running anything.

    capacity: tokens per row that there is room for (default: the prompt alone). No weights are needed.
    """
    of = jax.ShapeDtypeStruct
    heads = (batch, config.kv_heads)

    def layer(m) -> list:
        slots = m.kept(prompt) + (capacity or prompt) - prompt
        if m.restricted:
            return jax.make_jaxpr(lambda: m.empty(batch, slots, dtype))().out_avals
        rows = of((*heads, prompt, config.head_dim), dtype)
        shown = prompt if m.queries is None else m.queries
        q = of((*heads, config.groups, shown, config.head_dim), dtype)
        at, pos = (of((batch, *shape), jnp.int32) for shape in ((shown,), (1, prompt)))
        run = lambda k, v, pos, q, at: m.prefill(Block(k, v, pos), slots, Obs(q, at) if shown else None)  # noqa: E731
        return jax.make_jaxpr(run)(rows, rows, pos, q, at).out_avals

    plan = method.plan(config)
    sizes = {m: state_bytes(layer(m)) for m in set(plan)}
    return {kind: sum(sizes[m][kind] for m in plan) for kind in ("device", "pinned_host")}


def kept_positions(state: State) -> list[list[list[np.ndarray]]]:
    """[layer][row][key/value head]: the positions, ascending, of the tokens whose keys and values the state holds."""

    def layer(s):
        pos = np.asarray(s.positions() if hasattr(s, "positions") else s.pos)
        heads = next(x.shape[1] for x in jax.tree.leaves(s) if x.ndim == 4)  # whatever holds them is [B K ...]
        pos = np.broadcast_to(pos, (pos.shape[0], heads, pos.shape[2]))
        return [[np.sort(head[head >= 0]) for head in row] for row in pos]

    return [layer(s) for s in state.layers]
