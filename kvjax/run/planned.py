"""What a cache will take, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.accounting import state_bytes
from kvjax.cache.contract import KVMethod, Layer, slots_of, unnumbered
from kvjax.core import arguments
from kvjax.core.observe import Obs
from kvjax.core.types import Block, KvjaxError
from kvjax.models.config import Config
from kvjax.run.forward import Plan
from kvjax.run.plan import bind
from kvjax.run.prompts import round_up

LONGEST = 2**24
"""Tokens of a prompt to be planned for: budgets are tables of all lengths, and no model has so many positions."""


def planned_bytes(
    method: str | KVMethod,
    config: Config,
    prompt: int,
    *,
    capacity: int | None = None,
    batch: int = 1,
    width: int | None = None,
    dtype: Any = jnp.bfloat16,
) -> dict[str, int]:
    """`state_bytes` of the layers after a prefill of `batch` prompts of so many tokens each, without running anything.

    capacity: tokens per row that there is room for (default: the prompt alone); `prefill` has room for 128 more, and
    rounds up to a multiple of 64, which `cache.capacity` tells. width: what prompts are padded to, default as `prefill`
    does it; a second tier of precision has slots for so many tokens. dtype: in which the model computes, bfloat16 if
    nothing is said; `model.dtype` tells. No weights are needed. Where layers share a budget by what the prompt is like,
    it is counted as divided evenly.
    """
    if not isinstance(config, Config):
        raise KvjaxError(f"planned_bytes takes a model's configuration, such as model.config, got {config!r:.80}")
    arguments.integer("prompt", prompt, most=LONGEST)
    arguments.integer("batch", batch)
    capacity = prompt if capacity is None else arguments.integer("capacity", capacity, prompt)
    width = round_up(prompt) if width is None else arguments.integer("width", width)
    plan = bind(method, config)
    slots = [slots_of(layer, (prompt,), capacity) for layer in plan]
    return bytes_of(plan, config, slots, batch, min(width, capacity), arguments.float_type(dtype))


def bytes_of(plan: Plan, config: Config, slots: Sequence[int], batch: int, width: int, dtype: Any) -> dict[str, int]:
    """`planned_bytes` of a method that is bound to every layer, and has so many slots in each."""
    total, known = {"device": 0, "pinned_host": 0}, {}
    for layer, held in zip(plan, slots, strict=True):
        alike = unnumbered(layer), held  # equally many slots then take equally many bytes
        if alike not in known:
            arrays, _ = abstract_state(layer, config, width, held, batch, dtype)
            known[alike] = state_bytes(arrays)
        for kind, size in known[alike].items():
            total[kind] += size
    return total


def abstract_state(layer: Layer, config: Config, prompt: int, slots: int, batch: int, dtype: Any) -> tuple[list, Any]:
    """One layer's state after prompts of so many tokens: (its arrays, abstract but of a memory kind; their tree)."""

    def array(*shape: int, of: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *shape), of)

    wanted = layer.needs.queries
    asked = prompt if wanted is None else wanted
    length = 0 if layer.needs.chunk else prompt
    rows = array(config.kv_heads, length, config.head_dim)
    q = array(config.kv_heads, config.groups, asked, config.head_dim)

    projection = (config.kv_heads, config.groups, config.head_dim, config.width)
    output = jax.ShapeDtypeStruct((1, *projection), dtype) if layer.needs.output else None
    hidden = array(1, length, config.width) if layer.needs.hidden else None
    probed = array(config.kv_heads, length, of=jnp.float32) if layer.needs.probe else None
    block = Block(rows, rows, array(1, length, of=jnp.int32))
    neighbour = block if layer.needs.neighbour else None
    observed = Obs(q, array(asked, of=jnp.int32), None, output, hidden, probed, neighbour)

    def prefill(block, observed):
        seen = observed if layer.needs.observes and length else None
        return layer.prefill(block, seen, slots)

    traced, shapes = jax.make_jaxpr(prefill, return_shape=True)(block, observed)
    return traced.out_avals, jax.tree.structure(shapes)
