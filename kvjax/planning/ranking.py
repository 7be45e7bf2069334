"""Counts the numbers that a decode step ranks, to choose what it reads: on a CPU that takes longer than the reading."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.protocol import KVMethod, num_layer_slots
from kvjax.cache.reading_layer import ReadingLayer
from kvjax.core import memory
from kvjax.core.types import KVBlock
from kvjax.engine.forward import layer_calls
from kvjax.engine.layer_prompt import LayerCall
from kvjax.engine.plan import bind
from kvjax.generation.inputs import round_up
from kvjax.generation.memory_plan import abstract_state
from kvjax.models.config import Config

RANKING = ("top_k", "sort", "approx_top_k")
"""Primitives of JAX that rank their first operand."""


def count_ranked(method: KVMethod, config: Config, context: int, room: int, batch: int, dtype: str) -> int:
    """Counts the numbers that `top_k` and `sort` get in a step, from the traced steps of all layers.

    Arguments are as in `kvjax.planning.plan.trace_layers`, on a single device.
    """
    total, below = 0, None
    plan = bind(method, config)
    num_slots = tuple(num_layer_slots(layer, (context,), context + room) for layer in plan)
    for call in layer_calls(plan, config, num_slots):
        ranked, below = _count_layer(call, config, min(round_up(context), context + room), batch, dtype, below)
        total += ranked
    return total


@functools.lru_cache(maxsize=512)
def _count_layer(call: LayerCall, config: Config, prompt: int, batch: int, dtype: str, below: Any) -> tuple[int, Any]:
    """Counts one layer's; `below` is the abstract value that the layer below hands up: its leaves and their tree."""
    kind = call.kind
    assert kind is not None
    if isinstance(call.layer, ReadingLayer):  # it ranks what the layer that it reads ranks
        call = dataclasses.replace(call, layer=call.layer.source)
    layer, a = call.layer, kind.attention
    arrays, tree = abstract_state(call, config, prompt, batch, jnp.dtype(dtype))
    from_below, tree_below = ((), None) if below is None else below
    tokens, abstract = 1 + layer.needs.draft_tokens, jax.ShapeDtypeStruct
    q = abstract((batch, a.kv_heads, a.groups, tokens, a.head_dim), jnp.dtype(dtype))
    k, v = (abstract((batch, a.kv_heads, tokens, width), jnp.dtype(dtype)) for width in (a.head_dim, a.value_dim))
    block: Any = KVBlock(k, v, abstract((batch, 1, tokens), jnp.int32))  # pyright: ignore[reportArgumentType]

    def step(leaves: list[Any], from_below: list[Any], q: Any, block: Any) -> Any:
        # Abstract arguments lie on the device; these copies say where the state lies.
        leaves = [
            jax.device_put(x, memory.HOST) if memory.is_host(a) else x for x, a in zip(leaves, arrays, strict=True)
        ]
        cross_layer = None if tree_below is None else jax.tree.unflatten(tree_below, from_below)
        result = layer.extend(jax.tree.unflatten(tree, leaves), q, block, 1, cross_layer)
        return result.out, memory.without_guards(result.state), result.cross_layer

    shapes = [abstract(x.shape, x.dtype) for x in arrays]
    traced, (_, _, above) = jax.make_jaxpr(step, return_shape=True)(shapes, list(from_below), q, block)
    leaves, above_tree = jax.tree.flatten(above)
    handed = (tuple(abstract(x.shape, x.dtype) for x in leaves), above_tree) if leaves else None
    return _count_jaxpr(traced.jaxpr), handed


def _count_jaxpr(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in RANKING:
            total += math.prod(eqn.invars[0].aval.shape)
        inner = [
            _count_jaxpr(getattr(x, "jaxpr", x))
            for value in eqn.params.values()
            for x in (value if isinstance(value, tuple | list) else (value,))
            if hasattr(getattr(x, "jaxpr", x), "eqns")
        ]
        if eqn.primitive.name == "cond":  # a branch that does more is one that is rarely taken
            total += min(inner, default=0)
        else:
            total += sum(inner) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
    return total
