"""Bytes that a cache will take, and that a decode step will read of it, counted from shapes: nothing is run."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.accounting import CacheBytes, full_bytes
from kvjax.cache.eviction.budget_allocation import most_shared_slots
from kvjax.cache.protocol import BoundLayer, KVMethod, MeteredLayer, SizedLayer, num_layer_slots
from kvjax.cache.reading_layer import ReadingLayer
from kvjax.core import memory
from kvjax.core.attention_mass import Observation
from kvjax.core.memory import array_bytes
from kvjax.core.step_bytes import StepBytes
from kvjax.core.types import KVBlock
from kvjax.engine.forward import BoundLayers, layer_calls
from kvjax.engine.layer_prompt import LayerCall
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError
from kvjax.generation.inputs import round_up
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords

MAX_PROMPT_TOKENS = 2**24
"""Longest prompt that is planned for: budgets are tables over all lengths, and no model has as many positions."""


@checks_keywords
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
    """Counts the bytes of a cache from shapes alone: nothing is run, and no weights are needed.

    `held` equals the result of `state_bytes` after a prefill of such prompts. If the prompt decides how many tokens a
    layer or a head keeps (CAKE, AdaKV), it is the most that they keep together, and `reserved` may be larger in a
    batch.

    Args:
      method: a method, or its string.
      model: a model, or its configuration, for which `dtype` must be given.
      prompt: tokens of each prompt.
      capacity: tokens that a sequence may grow to; by default the prompt alone. `prefill` and `generate` add headroom
        and round up to a multiple of 64; `cache.capacity` is the result.
      batch: sequences.
      width: tokens that prompts are padded to, by default as in `prefill`. A second tier of precision has slots for as
        many tokens.
      dtype: of keys and values, "bfloat16" or "bf16" for example; by default that of the model.

    Returns:
      The bytes of the cache after the prefill, and those of the exact cache in the same dtype.

    Raises:
      KvjaxError: a configuration without a dtype; a number out of range; a method that cannot serve the model.
    """
    layers = planned_layers("planned_bytes", method, model, prompt, capacity, batch, width, dtype)
    held, empty = {"device": 4 * batch, "pinned_host": 0}, {"device": 0, "pinned_host": 0}  # the cache's own `length`
    for layer, state, _, count in layers.states:
        total, unused = array_bytes(state), dict.fromkeys(held, 0)
        if isinstance(layer, SizedLayer):
            unused = layer.empty_bytes(state, layers.dtype, prompt)
        for kind in held:
            held[kind] += count * (total[kind] - unused[kind])
            empty[kind] += count * unused[kind]
    return CacheBytes(held, empty, full_bytes(layers.config, [prompt] * batch, layers.dtype), layers.dtype)


@checks_keywords
def step_bytes(
    method: str | KVMethod,
    model: Model | Config,
    prompt: int,
    *,
    capacity: int | None = None,
    batch: int = 1,
    width: int | None = None,
    dtype: Any = None,
) -> StepBytes:
    """Counts the bytes of a cache that one decode step reads and writes, from shapes alone: nothing is run.

    It is the cache after prompts of `prompt` tokens, and a step of one token for every sequence. All slots count, up to
    `capacity`, since a compiled step reads empty ones too. Weights do not count, nor what a step makes for itself, such
    as logits. What happens once in many steps, such as the coding of a full window, counts by its mean or not at all.

    Args:
      method: a method, or its string.
      model: a model, or its configuration, for which `dtype` must be given.
      prompt: tokens of each prompt.
      capacity: tokens that a sequence may grow to, as in `planned_bytes`; by default the prompt alone.
      batch: sequences.
      width: tokens that prompts are padded to, as in `planned_bytes`.
      dtype: of keys and values, "bfloat16" or "bf16" for example; by default that of the model.

    Returns:
      The bytes of all layers and sequences together, by the path that they take. A layer that does not count its own
      bytes, of a method that is no `kvjax.Method`, reads all of its state.

    Raises:
      KvjaxError: a configuration without a dtype; a number out of range; a method that cannot serve the model.
    """
    layers = planned_layers("step_bytes", method, model, prompt, capacity, batch, width, dtype)
    total = StepBytes()
    for layer, _, state_read, count in layers.states:
        total += count_step_bytes(layer, state_read) * count
    return total


def count_step_bytes(layer: BoundLayer, state: Any) -> StepBytes:
    """Counts the bytes that a layer reads and writes in a step.

    A layer that reads another layer's cache is given the state of that layer.
    """
    if isinstance(layer, ReadingLayer):
        return layer.read_bytes(state)
    return layer.step_bytes(state) if isinstance(layer, MeteredLayer) else StepBytes.of_all(state)


def trace_state_read(call: LayerCall, config: Config, prompt: int, batch: int, dtype: Any) -> Any:
    """Traces the state that a layer's step reads, its own or that of the layer that it reads, as `abstract_state`."""
    if isinstance(call.layer, ReadingLayer):
        call = dataclasses.replace(call, layer=call.layer.source)
    arrays, tree = abstract_state(call, config, prompt, batch, dtype)
    return jax.tree.unflatten(tree, arrays)


class PlannedLayers(NamedTuple):
    """The states that the layers of a model will have."""

    config: Config
    dtype: str
    # (layer, its abstract state, the one that its step reads, number of such layers)
    states: list[tuple[BoundLayer, Any, Any, int]]


def planned_layers(
    caller: str,
    method: str | KVMethod,
    model: Model | Config,
    prompt: int,
    capacity: int | None,
    batch: int,
    width: int | None,
    dtype: Any,
) -> PlannedLayers:
    """The states of all layers after a prefill, for the arguments of `planned_bytes`, which it checks."""
    config = model.config if isinstance(model, Model) else model
    if dtype is None and isinstance(model, Model):
        dtype = model.dtype
    if not isinstance(config, Config) or dtype is None:
        raise KvjaxError(
            f"{caller} takes a model, whose dtype it counts in, or a configuration such as model.config; for a "
            "configuration alone, say in which dtype keys and values are held, as in dtype='bfloat16'; got "
            f"{model!r:.80}"
        )
    dtype = arguments.float_type(dtype)
    arguments.integer("prompt", prompt, most=MAX_PROMPT_TOKENS)
    arguments.integer("batch", batch)
    capacity = prompt if capacity is None else arguments.integer("capacity", capacity, prompt)
    width = round_up(prompt) if width is None else arguments.integer("width", width)
    # Equal layers have equal states, and tracing one takes a while.
    states = []
    for call, count in count_layers(bind(method, config), config, prompt, capacity).items():
        arrays, tree = abstract_state(call, config, min(width, capacity), batch, dtype)
        state = state_read = jax.tree.unflatten(tree, arrays)
        if isinstance(call.layer, ReadingLayer):
            state_read = trace_state_read(call, config, min(width, capacity), batch, dtype)
        states.append((call.layer, state, state_read, count))
    return PlannedLayers(config, dtype.name, states)


def count_layers(plan: BoundLayers, config: Config, prompt: int, capacity: int) -> collections.Counter[LayerCall]:
    """Counts equal layers after prompts of `prompt` tokens: bound layer, slots and kind -> number of layers."""
    num_slots = tuple(num_layer_slots(layer, (prompt,), capacity) for layer in plan)
    sources = [layer.source if isinstance(layer, ReadingLayer) else layer for layer in plan]
    if any(layer.needs.global_budget for layer in plan):
        # Each layer's slots are rounded up after the budget has been divided: a plan is never below the actual bytes.
        kept_slots = (layer.num_slots(prompt, 0) if layer.needs.global_budget else 0 for layer in sources)
        num_slots = tuple(
            min(n + most_shared_slots(kept, prompt) - kept if kept else n, capacity)
            for n, kept in zip(num_slots, kept_slots, strict=True)
        )
    return collections.Counter(layer_calls(plan, config, num_slots))


@functools.lru_cache(maxsize=32)
def trace_prefill(call: LayerCall, config: Config, prompt: int, batch: int, dtype: Any) -> tuple[Any, Any]:
    """Traces `BoundLayer.prefill` of prompts of `prompt` tokens: its jaxpr, and the tree of the state's shapes."""
    assert call.kind is not None
    layer, needs, a = call.layer, call.layer.needs, call.kind.attention

    def array(*shape: int, dtype: Any = dtype, batch: int = batch) -> Any:  # abstract, where its users say Array
        return jax.ShapeDtypeStruct((batch, *shape), dtype)

    length = 0 if needs.prompt_chunk else prompt
    num_queries = prompt if needs.observed_queries is None else needs.observed_queries
    keys, values = array(a.kv_heads, length, a.head_dim), array(a.kv_heads, length, a.value_dim)
    block = KVBlock(keys, values, array(1, length, dtype=jnp.int32))
    projection = array(a.kv_heads, a.groups, a.value_dim, config.width, batch=1)
    observation = Observation(
        array(a.kv_heads, a.groups, num_queries, a.head_dim),
        array(num_queries, dtype=jnp.int32),
        output_projection=projection if needs.output_projection else None,
        hidden_states=array(1, length, config.width) if needs.hidden_states else None,
        replay_scores=array(a.kv_heads, length, dtype=jnp.float32) if needs.replay else None,
        paired_block=block if needs.paired_layer else None,
        sinks=array(a.kv_heads, a.groups, batch=1) if a.sinks else None,
    )

    def prefill(block: KVBlock, observation: Observation | None) -> Any:
        return layer.prefill(block, observation, call.num_slots)

    with jax.enable_x64(False):  # a cache has no arrays of 64 bits
        return jax.make_jaxpr(prefill, return_shape=True)(block, observation if needs.observes and length else None)


def trace_chunk(call: LayerCall, config: Config, prompt: int, batch: int, dtype: Any) -> Any:
    """Traces how a layer that is fed a prompt in chunks of its own takes one: the jaxpr of `BoundLayer.extend`.

    The arguments are those of `trace_prefill`.
    """
    assert call.kind is not None
    layer, a, size = call.layer, call.kind.attention, call.layer.needs.prompt_chunk
    arrays, tree = abstract_state(call, config, prompt, batch, dtype, guards=True)
    state = jax.tree.unflatten(tree, arrays)

    def array(*shape: int, dtype: Any = dtype) -> Any:  # abstract, where its users say Array
        return jax.ShapeDtypeStruct((batch, *shape), dtype)

    q = array(a.kv_heads, a.groups, size, a.head_dim)
    keys, values = array(a.kv_heads, size, a.head_dim), array(a.kv_heads, size, a.value_dim)
    new = KVBlock(keys, values, array(1, size, dtype=jnp.int32))

    def extend(state: Any, q: Any, new: KVBlock) -> Any:
        return layer.extend(state, q, new, size, None)

    with jax.enable_x64(False):
        return jax.make_jaxpr(extend)(state, q, new).jaxpr


def abstract_state(
    call: LayerCall, config: Config, prompt: int, batch: int, dtype: Any, *, guards: bool = False
) -> tuple[list, Any]:
    """Traces the state that `BoundLayer.prefill` makes: its abstract arrays, and its tree structure.

    The arrays know their memory kind, which `jax.eval_shape` would drop. With `guards`, buffers have theirs, which
    counts of bytes leave out and programs expect. Other arguments are those of `trace_prefill`.
    """
    traced, shapes = trace_prefill(call, config, prompt, batch, dtype)
    state = jax.tree.unflatten(jax.tree.structure(shapes), traced.out_avals)
    arrays, tree = jax.tree.flatten(state if guards else memory.without_guards(state))
    return arrays, tree
