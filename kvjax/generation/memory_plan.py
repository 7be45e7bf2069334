"""What a cache will take, without running anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.accounting import CacheBytes, array_bytes, full_bytes
from kvjax.cache.eviction.budget_allocation import SHARED_ROUNDING
from kvjax.cache.protocol import BoundLayer, KVMethod, PlannableLayer, num_layer_slots
from kvjax.core.attention_mass import Observation
from kvjax.core.types import KVBlock
from kvjax.engine.forward import Plan
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError
from kvjax.generation.inputs import round_up
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.utils import arguments

LONGEST = 2**24
"""Tokens of a prompt to be planned for: budgets are tables of all lengths, and no model has so many positions."""


def planned_bytes(
    method: str | KVMethod,
    model: Model | Config,
    prompt: int,
    *,
    capacity: int | None = None,
    batch: int = 1,
    width: int | None = None,
    dtype: Any = None,
) -> CacheBytes:
    """Counts what a cache will take, from shapes alone: nothing is run, and no weights are needed.

    `held` is what `state_bytes` finds after a prefill of such prompts. Where the prompt decides how many tokens a layer
    or a head keeps (CAKE, AdaKV), it is what they keep together at most, and `reserved` may be larger in a batch.

    Args:
      method: a method, or its string.
      model: a model, or its configuration, for which `dtype` must be given.
      prompt: tokens of each prompt.
      capacity: tokens of a sequence that there is room for; default the prompt alone. `prefill` and `generate` ask for
        room behind it and round up to a multiple of 64; `cache.capacity` tells.
      batch: sequences.
      width: tokens that prompts are padded to; default as `prefill` does it. A second tier of precision has slots for
        as many tokens.
      dtype: of keys and values, "bfloat16" or "bf16" for example; default that of the model.

    Returns:
      The bytes of the cache after the prefill, beside those of the exact cache in the same dtype.

    Raises:
      KvjaxError: a configuration without a dtype; a number that cannot be; a method that cannot serve the model.
    """
    config, dtype = _config_and_dtype(model, dtype)
    arguments.integer("prompt", prompt, most=LONGEST)
    arguments.integer("batch", batch)
    capacity = prompt if capacity is None else arguments.integer("capacity", capacity, prompt)
    width = round_up(prompt) if width is None else arguments.integer("width", width)
    plan = bind(method, config)
    slots = [num_layer_slots(layer, (prompt,), capacity) for layer in plan]
    if any(layer.needs.global_budget for layer in plan):
        # Each layer's slots are rounded up after the budget has been divided: a plan is never below what is held.
        slots = [min(n + SHARED_ROUNDING - 1, capacity) for n in slots]
    held = counted(plan, config, slots, batch, min(width, capacity), dtype, prompt)
    return dataclasses.replace(held, full=full_bytes(config, [prompt] * batch, dtype))


def _config_and_dtype(model: Model | Config, dtype: Any) -> tuple[Config, np.dtype]:
    """Of a model, or of a configuration with the dtype that is named beside it."""
    if isinstance(model, Model):
        return model.config, model.dtype if dtype is None else arguments.float_type(dtype)
    if not isinstance(model, Config):
        raise KvjaxError(f"planned_bytes takes a model, or a configuration such as model.config, got {model!r:.80}")
    if dtype is None:
        raise KvjaxError(
            "planned_bytes takes a model, whose dtype it counts in; for a configuration alone, say in which dtype keys "
            "and values are held, as in dtype='bfloat16'"
        )
    return model, arguments.float_type(dtype)


def bytes_of(plan: Plan, config: Config, slots: Sequence[int], batch: int, width: int, dtype: Any) -> dict[str, int]:
    """Bytes by memory kind of the layers of a cache that has so many slots in each."""
    return counted(plan, config, slots, batch, width, dtype, width).total


def counted(
    plan: Plan, config: Config, slots: Sequence[int], batch: int, width: int, dtype: Any, prompt: int
) -> CacheBytes:
    """The bytes of a cache with so many slots in each layer, after prompts of so many tokens; `full` is left at 0."""
    held, empty = {"device": 4 * batch, "pinned_host": 0}, {"device": 0, "pinned_host": 0}  # the cache's own `length`
    known: dict[Any, tuple[dict[str, int], dict[str, int]]] = {}
    for layer, count in zip(plan, slots, strict=True):
        alike = layer, count  # equal layers take equally many bytes
        if alike not in known:
            arrays, tree = abstract_state(layer, config, width, count, batch, dtype)
            room = {"device": 0, "pinned_host": 0}
            if isinstance(layer, PlannableLayer):
                room = layer.planned_empty_bytes(jax.tree.unflatten(tree, arrays), prompt, jnp.dtype(dtype).name)
            known[alike] = array_bytes(arrays), room
        total, room = known[alike]
        for kind in held:
            held[kind] += total[kind] - room[kind]
            empty[kind] += room[kind]
    return CacheBytes(held, empty, 0, jnp.dtype(dtype).name)


def abstract_state(
    layer: BoundLayer, config: Config, prompt: int, slots: int, batch: int, dtype: Any
) -> tuple[list, Any]:
    """One layer's state after prompts of so many tokens: (its arrays, abstract but of a memory kind; their tree)."""

    def array(*shape: int, of: Any = dtype) -> Any:  # abstract, where its users say Array
        return jax.ShapeDtypeStruct((batch, *shape), of)

    wanted = layer.needs.observed_queries
    asked = prompt if wanted is None else wanted
    length = 0 if layer.needs.prompt_chunk else prompt
    rows = array(config.kv_heads, length, config.head_dim)
    q = array(config.kv_heads, config.groups, asked, config.head_dim)

    projection = (config.kv_heads, config.groups, config.head_dim, config.width)
    output: Any = jax.ShapeDtypeStruct((1, *projection), dtype) if layer.needs.output_projection else None
    hidden = array(1, length, config.width) if layer.needs.hidden_states else None
    probed = array(config.kv_heads, length, of=jnp.float32) if layer.needs.replay else None
    block = KVBlock(rows, rows, array(1, length, of=jnp.int32))
    neighbour = block if layer.needs.paired_layer else None
    observed = Observation(q, array(asked, of=jnp.int32), None, output, hidden, probed, neighbour)

    def prefill(block, observed):
        seen = observed if layer.needs.observes and length else None
        return layer.prefill(block, seen, slots)

    traced, shapes = jax.make_jaxpr(prefill, return_shape=True)(block, observed)
    return traced.out_avals, jax.tree.structure(shapes)
