"""The end of a prompt in a decoder that is not kvjax's, for methods that compress once all layers have seen it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from kvjax.cache.protocol import BoundLayer
from kvjax.core.explicit_axes import accepts_explicit_axes, layer_specs, spec_of
from kvjax.core.mesh import auto_mesh, vary
from kvjax.core.precision import computes_in_32_bits
from kvjax.core.types import Array
from kvjax.custom_decoder.layer_cache import Empty, ExactPrompt, LayerCache, layer_caches, map_layer_caches
from kvjax.engine.layer_prompt import LayerPrompt
from kvjax.engine.prefill import compress_prompts
from kvjax.engine.replay import ChunkCopy, ReplayPrompts, copy_chunks
from kvjax.errors import KvjaxError
from kvjax.utils.keywords import checks_keywords
from kvjax.utils.mesh_context import keeps_callers_mesh


@checks_keywords
@computes_in_32_bits
@keeps_callers_mesh
def finish(
    cache: Any,
    *,
    tokens: Array | np.ndarray | None = None,
    repeat: Callable[[Any, Array, Array], Any] | None = None,
    replay_prompts: ReplayPrompts = ((), ()),
) -> Any:
    """Compresses the prompts of all layers, for methods that do so once every layer has seen them.

    It returns the cache of any other method as it is, so that a decoder may always call it.

    Args:
      cache: of all layers, after the prompt: the dict of `attach`, or any pytree with its entries.
      tokens: i32[B T], the prompt as the decoder was given it, padding included; for methods that repeat it.
      repeat: run(cache, tokens, positions) -> cache runs the decoder on the tokens [B n] at positions i32[B n], as on a
        step, and returns the cache; for methods that have the model repeat the prompt (KVzip).
      replay_prompts: ids before the first and before every later chunk that is repeated, as an instruction.

    Returns:
      The cache, of the same structure.

    Raises:
      KvjaxError: a cache without its prompt or without some of its layers, or a method that repeats the prompt and is
        given no `repeat`.
    """
    caches = layer_caches(cache)
    if any(isinstance(x.state, Empty) for x in caches):
        raise KvjaxError("finish follows the prompt: attend the prompt in every layer first")
    if not any(isinstance(x.state, ExactPrompt) for x in caches):
        return cache
    ordered = _in_order(caches)
    plan = [x.layer.bound for x in ordered]
    replays = {layer.needs.replay for layer in plan} - {None}
    if replays:
        if repeat is None or tokens is None:
            raise KvjaxError(
                "this method has the model repeat the prompt: finish(cache, tokens=tokens, repeat=run), where "
                "run(cache, tokens, positions) runs your decoder and returns the cache; turned_queries scores in one "
                "pass"
            )
        cache = _repeat_prompt(cache, ordered, jnp.asarray(tokens, jnp.int32), repeat, replay_prompts)
        ordered = _in_order(layer_caches(cache))
    compressed = dict(zip([x.state.index for x in ordered], _compress(ordered), strict=True))
    return map_layer_caches(lambda x: compressed[x.state.index], cache)


def _compressed_specs(result: Any, caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Returns the specs of what `_compress` returns: a state lies as the exact keys do, and all else as before."""
    specs = []
    for after, before in zip(result, caches, strict=True):
        prompt = before.state.prompt
        if isinstance(prompt, LayerPrompt):
            state = layer_specs(after.state, *prompt.k.shape[:2], *spec_of(prompt.k)[:2])
        else:
            state = jax.tree.map(spec_of, prompt)
        specs.append(dataclasses.replace(after, state=state, length=spec_of(before.length)))
    return specs


@accepts_explicit_axes(_compressed_specs, lambda caches: caches[0].layer.mesh)
def _compress(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Compresses the prompts of all layers, in their order."""
    layer, lengths, T = caches[0].layer, caches[0].length, caches[0].state.prompt.k.shape[2]
    assert lengths is not None
    calls, prompts = [x.layer.call(T) for x in caches], [x.state.prompt for x in caches]
    mesh = None if layer.mesh is None else auto_mesh(layer.mesh)
    states = compress_prompts(prompts, lengths, calls, layer.capacity, mesh)
    return [dataclasses.replace(x, state=state) for x, state in zip(caches, vary(states), strict=True)]


def _repeat_prompt(
    cache: Any, caches: Sequence[LayerCache], tokens: Array, repeat: Callable[..., Any], replay_prompts: ReplayPrompts
) -> Any:
    """Runs the prompt a second time, chunk by chunk after itself; see `kvjax.engine.replay.copy_chunks`."""
    lengths, layers = caches[0].length, [x.layer.bound for x in caches]
    # Layers with a window may repeat nothing, and keep no order.
    order = next(x.state.order for x in caches if x.layer.bound.needs.replay)
    assert lengths is not None
    B, T = len(lengths), caches[0].state.prompt.k.shape[2]
    if tokens.shape != (B, T):
        raise KvjaxError(f"tokens are those of the prompt, of shape {(B, T)}, got {tokens.shape}")

    def set_start(cache: Any, start: Array | None) -> Any:
        return map_layer_caches(
            lambda x: dataclasses.replace(x, state=dataclasses.replace(x.state, start=start)), cache
        )

    for copy in _copy_chunks(tokens, order, lengths, layers, replay_prompts):
        repeated = repeat(set_start(cache, jnp.asarray(copy.start)), copy.tokens, copy.pos)
        for x in layer_caches(repeated):
            if not isinstance(x.state, ExactPrompt) or x.state.start is None:
                raise KvjaxError("repeat returns the cache that attend has returned in every layer")
        cache = set_start(repeated, None)
    return cache


@accepts_explicit_axes(lambda result, tokens, *_: jax.tree.map(lambda _: PartitionSpec(spec_of(tokens)[0]), result))
def _copy_chunks(
    tokens: Array,
    order: Array | None,
    lengths: Array,
    layers: Sequence[BoundLayer],
    replay_prompts: ReplayPrompts,
) -> list[ChunkCopy]:
    """Copies the prompts in the order in which the caches hold them, i32[B T]."""
    tokens = tokens if order is None else jnp.take_along_axis(tokens, order, 1)
    return copy_chunks(tokens, lengths, layers, replay_prompts)


def _in_order(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Sorts the caches by layer; JAX sorts the keys of dictionaries, by which layer_10 comes before layer_2."""
    known = {x.state.index: x for x in caches if isinstance(x.state, ExactPrompt) and x.state.index is not None}
    num_layers = 1 + max(known)
    if len(known) != len(caches) or len(caches) != num_layers:
        raise KvjaxError(
            f"finish takes the caches of all layers, each after its prompt, got {sorted(known)} of {num_layers}"
        )
    return [known[i] for i in range(num_layers)]
