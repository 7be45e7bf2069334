"""Prompts into caches. One driver for every method."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.cache.eviction.budget_allocation import SHARED_ROUNDING
from kvjax.cache.protocol import BoundLayer, BudgetedLayer, Cache, num_layer_slots
from kvjax.core.mesh import constrain, vary
from kvjax.core.types import Array, KVBlock
from kvjax.engine import sharded_layer
from kvjax.engine.forward import (
    PLAIN,
    Compiled,
    Plan,
    Progress,
    Target,
    embed,
    layer_calls,
    outer_params,
    run_layers,
    scan_if_traced,
)
from kvjax.engine.layer_prompt import LayerPrompt, encode_prompt, observed_block
from kvjax.engine.modes import ChunkedPrefill, FullPrefill, LayerCall, PromptReplay
from kvjax.errors import KvjaxError
from kvjax.models.decoder import take_tokens

SHORT_PROMPT_TOKENS = 512
"""Prompts up to this length compute all outputs of the last layer too, so that it reuses the other layers' program."""


def prefill(
    params: Any,
    tokens: Array,
    lengths: Array,
    plan: Plan,
    target: Target,
    capacity: int,
    *,
    chunk: int | None = None,
    num_slots: tuple[int, ...] | None = None,
    replay_prompts: tuple[Sequence[int], Sequence[int]] = ((), ()),
    compiled: Compiled = PLAIN,
    progress: Progress = iter,
) -> tuple[Array, Cache]:
    """Runs prompts and compresses them.

    Args:
      params: the decoder's parameters.
      tokens: i32[B T], left-aligned, padded on the right.
      lengths: i32[B], at least 1.
      plan: a method bound to each layer.
      target: model configuration and mesh.
      capacity: tokens that a sequence of the cache may grow to.
      chunk: tokens run at a time; None: all at once, or as the method asks.
      num_slots: of each layer's state; None: enough for prompts of T tokens.
      replay_prompts: ids before the first and before every later replayed chunk (KVzip).
      compiled: the functions that run a layer and make logits.
      progress: wraps the numbers of the chunks, for a bar; used where the chunks are a Python loop.

    Returns:
      Logits of each prompt's last token f32[B V], and the cache.
    """
    T = tokens.shape[1]
    if num_slots is None:
        num_slots = tuple(num_layer_slots(layer, (min(T, capacity),), capacity) for layer in plan)
    needs = [layer.needs for layer in plan]
    chunk = chunk or min((n.prompt_chunk for n in needs if n.prompt_chunk), default=None)
    if chunk is None and not any(n.global_budget or n.replay or n.paired_layer for n in needs):
        hidden, states = _run_whole(params, tokens, lengths, plan, target, capacity, num_slots, compiled)
    else:
        hidden, prompts = prefill_exactly(
            params,
            tokens,
            lengths,
            plan,
            target,
            chunk=chunk,
            num_slots=num_slots,
            replay_prompts=replay_prompts,
            compiled=compiled,
            progress=progress,
        )
        states = compress_prompts(prompts, lengths, plan, target, capacity, num_slots)
    logits = compiled.unembed(outer_params(params), hidden, target=target)
    # Arrays of zeros are constants until the first token is written, and a caller's loop needs one type throughout.
    return logits, vary(Cache(states, lengths, capacity, plan, target.config, params["embedding"].dtype.name))


def empty(plan: Plan, target: Target, batch: int, capacity: int, dtype: Any) -> Cache:
    """Makes the cache of `batch` sequences that have no token yet; see `kvjax.functional.empty`."""
    c, lengths = target.config, jnp.zeros(batch, jnp.int32)
    num_slots = tuple(num_layer_slots(layer, (0,), capacity) for layer in plan)
    prompts = []
    for call in layer_calls(plan, c, num_slots):
        prompt = empty_prompt(batch=batch, width=min(capacity, 64), dtype=dtype, call=call, target=target)
        needs = call.layer.needs
        if needs.output_projection and not needs.prompt_chunk:
            prompt = prompt._replace(output_projection=jnp.zeros((1, c.kv_heads, c.groups, c.head_dim, c.width), dtype))
        if needs.replay:
            prompt = prompt._replace(replay_scores=jnp.zeros(prompt.k.shape[:3], jnp.float32))
        prompts.append(prompt)
    states = compress_prompts(prompts, lengths, plan, target, capacity, num_slots, longest=0)
    return vary(Cache(states, lengths, capacity, plan, c, jnp.dtype(dtype).name))


def _run_whole(
    params: Any,
    tokens: Array,
    lengths: Array,
    plan: Plan,
    target: Target,
    capacity: int,
    num_slots: tuple[int, ...],
    compiled: Compiled,
) -> tuple[Array, tuple[Any, ...]]:
    """Each layer's exact keys and values exist only until its state has been made: hidden [B D], states."""
    num_observed: int | None = None
    observed = [layer.needs.observed_queries for layer in plan]
    if None not in observed and tokens.shape[1] > SHORT_PROMPT_TOKENS:
        num_observed = max(1, *(n for n in observed if n is not None))
    calls = layer_calls(plan, target.config, num_slots, num_observed is not None)
    hidden, angles, _ = embed(outer_params(params), tokens, None, None, target=target)
    mode = FullPrefill(lengths, capacity, num_observed)
    hidden, states = run_layers(params, hidden, angles, mode, calls, (None,) * len(plan), target, compiled)
    return take_last(hidden, lengths if num_observed is None else None), states


def prefill_exactly(
    params: Any,
    tokens: Array,
    lengths: Array,
    plan: Plan,
    target: Target,
    *,
    chunk: int | None = None,
    num_slots: tuple[int, ...] | None = None,
    replay_prompts: tuple[Sequence[int], Sequence[int]] = ((), ()),
    compiled: Compiled = PLAIN,
    progress: Progress = iter,
) -> tuple[Array, list[LayerPrompt | Any]]:
    """Runs prompts, and keeps each layer's exact keys and values with all that its method observes.

    Arguments are those of `prefill`. A layer whose method is fed the prompt chunk by chunk gives its cache state.

    Returns:
      The hidden vector of each prompt's last token [B D], and what each layer holds: a list, so that whoever uses a
      layer's prompt up can drop it.
    """
    num_slots = num_slots or (0,) * len(plan)
    hidden, prompts = _run_chunks(
        params, tokens, lengths, plan, target, num_slots, chunk or tokens.shape[1], compiled, progress
    )
    if any(layer.needs.replay for layer in plan):
        prompts = replay(params, tokens, lengths, prompts, plan, target, replay_prompts, compiled)
    prompts = list(prompts)
    for i, layer in enumerate(plan):
        if layer.needs.output_projection and not layer.needs.prompt_chunk:
            prompts[i] = prompts[i]._replace(output_projection=_output_projection(params[f"layer_{i}"]))
    return hidden, prompts


def _run_chunks(
    params: Any,
    tokens: Array,
    lengths: Array,
    plan: Plan,
    target: Target,
    num_slots: tuple[int, ...],
    chunk: int,
    compiled: Compiled,
    progress: Progress,
) -> tuple[Array, tuple[LayerPrompt | Any, ...]]:
    """Runs prompts chunk by chunk; each layer holds them exactly, or in its state where `Needs.prompt_chunk` asks."""
    B, T = tokens.shape
    dtype, outer = params["embedding"].dtype, outer_params(params)
    calls = layer_calls(plan, target.config, num_slots)
    states = tuple(empty_prompt(batch=B, width=T, dtype=dtype, call=call, target=target) for call in calls)

    def run_chunk(carry: tuple[Any, Array], xs: tuple[Array | np.int32, Array]) -> tuple[Any, None]:
        (states, last), (start, part) = carry, xs
        hidden, angles, _ = embed(outer, part, start, None, target=target)
        mode = ChunkedPrefill(start, lengths)
        hidden, states = run_layers(params, hidden, angles, mode, calls, states, target, compiled)
        return (states, _keep_last(hidden, lengths, start, last)), None

    # The last chunk may be shorter: one that reached beyond the prompt's padding would overflow the slots of a method
    # that is fed chunk by chunk.
    carry, num_chunks = vary((states, np.zeros((B, target.config.width), dtype))), T // chunk
    if num_chunks > 1:
        starts = np.arange(0, num_chunks * chunk, chunk, dtype=np.int32)
        parts = tokens[:, : num_chunks * chunk].reshape(B, num_chunks, chunk).swapaxes(0, 1)
        carry, _ = scan_if_traced(run_chunk, carry, (starts, parts), progress)
    elif num_chunks:
        carry, _ = run_chunk(carry, (np.int32(0), tokens[:, :chunk]))
    if T % chunk:
        carry, _ = run_chunk(carry, (np.int32(num_chunks * chunk), tokens[:, num_chunks * chunk :]))
    return carry[1], carry[0]


def replay(
    params: Any,
    tokens: Array,
    lengths: Array,
    prompts: Sequence[LayerPrompt],
    plan: Plan,
    target: Target,
    replay_prompts: tuple[Sequence[int], Sequence[int]],
    compiled: Compiled = PLAIN,
) -> tuple[LayerPrompt, ...]:
    """Runs the prompt a second time, chunk by chunk after itself, for the scores of KVzip."""
    replays = {layer.needs.replay for layer in plan if layer.needs.replay is not None}
    if len(replays) != 1 or any(layer.needs.prompt_chunk for layer in plan):
        raise KvjaxError("all layers repeat the prompt in one way, and read it whole before; use one method for all")
    (how,) = replays
    calls, outer = layer_calls(plan, target.config), outer_params(params)
    prompts = tuple(
        prompt._replace(replay_scores=jnp.zeros(prompt.k.shape[:3], jnp.float32)) if layer.needs.replay else prompt
        for layer, prompt in zip(plan, prompts, strict=True)
    )
    B, T = tokens.shape
    # Copies are padded to one width, so that all of them share one program.
    width = max(map(len, replay_prompts)) + how.lead_tokens + min(how.chunk_tokens, T)
    for start in range(0, T, how.chunk_tokens):
        text = np.asarray(replay_prompts[min(start, 1)], np.int32)
        first = max(start - how.lead_tokens, 0)
        copied = tokens[:, first : start + how.chunk_tokens]
        copy, num_tokens = _copy_chunk(copied, lengths, text, np.int32(start), np.int32(first), width=width)
        hidden, angles, pos = embed(outer, copy, lengths, num_tokens, target=target)
        mode = PromptReplay(np.int32(start), pos, lengths)
        _, prompts = run_layers(params, hidden, angles, mode, calls, prompts, target, compiled)
    return prompts


def compress_prompts(
    prompts: list[LayerPrompt | Any],
    lengths: Array,
    plan: Plan,
    target: Target,
    capacity: int,
    num_slots: tuple[int, ...],
    longest: int | None = None,
) -> tuple[Any, ...]:
    """Turns the exact prompts of all layers into cache states, and empties the list on the way.

    Args:
      prompts: what each layer holds.
      lengths: i32[B], of the prompts.
      plan: a method bound to each layer.
      target: model configuration and mesh.
      capacity: tokens that a sequence of the cache may grow to.
      num_slots: of each layer's state, where layers divide no budget among them.
      longest: tokens of the longest prompt, where a caller knows it under a transformation; None: their width.

    Returns:
      The cache state of each layer.
    """
    num_kept: list[Any] = [None] * len(plan)
    if any(layer.needs.global_budget for layer in plan):
        division = _divide_budget(measure_layers(prompts, lengths, plan, target), lengths, plan=plan)
        if isinstance(division, Tracer):
            # Nobody knows yet what a layer will keep, so each has slots for the whole prompt.
            longest_prompt = min(prompts[0].k.shape[2], capacity) if longest is None else longest
            num_kept, at_most = list(division), np.full(division.shape, longest_prompt)
        else:
            at_most, longest_prompt = np.asarray(division), int(np.max(lengths))
            num_kept = list(at_most)
        plan, num_slots = _fit_slots(plan, at_most, longest_prompt, capacity)
    calls = layer_calls(plan, target.config, num_slots)
    states: list[Any] = []
    below = None
    while prompts:
        # A layer's exact keys and values are dropped as soon as no other layer has to see them.
        i, prompt = len(states), prompts.pop(0)
        needs = plan[i].needs
        if needs.paired_layer:
            other = prompts[0] if needs.paired_layer > 0 else below
            assert other is not None
            prompt = prompt._replace(paired=(other.k, other.v))
        below = prompt if prompts and plan[i + 1].needs.paired_layer < 0 else None
        if not needs.prompt_chunk:  # one that was fed through its method is a cache state already
            prompt = compress(prompt, lengths, num_kept[i], call=calls[i], capacity=capacity, target=target)
        states.append(prompt)
    return tuple(states)


def measure_layers(prompts: Sequence[LayerPrompt], lengths: Array, plan: Plan, target: Target) -> Any:
    """Measures every layer's prompt, for a budget that all layers share: arrays [L B ..]."""
    calls = layer_calls(plan, target.config)
    measures = [_measure_prompt(p, lengths, call=c, target=target) for c, p in zip(calls, prompts, strict=True)]
    return jax.tree.map(lambda *layers: jnp.stack(layers), *measures)


def _fit_slots(plan: Plan, kept: np.ndarray, longest: int, capacity: int) -> tuple[Plan, tuple[int, ...]]:
    """The layers with room for what they keep, i32[L B] or i32[L B K] tokens, and the slots of their states."""
    room = -(-(capacity - longest) // 16) * 16  # in multiples, as in `num_layer_slots`
    layers = _budgeted(plan)
    most = [
        -(-layer.num_kept_slots(tokens) // SHARED_ROUNDING) * SHARED_ROUNDING
        for layer, tokens in zip(layers, kept, strict=True)
    ]
    slots = tuple(min(capacity, layer.num_slots_for(n, room)) for layer, n in zip(layers, most, strict=True))
    return tuple(layer.with_kept_slots(n) for layer, n in zip(layers, most, strict=True)), slots


def _budgeted(layers: Sequence[BoundLayer]) -> list[BudgetedLayer]:
    found: list[BudgetedLayer] = [layer for layer in layers if isinstance(layer, BudgetedLayer)]
    if len(found) < len(layers):
        raise KvjaxError(
            "some layers divide a budget among all, which takes the members of kvjax.cache.protocol.BudgetedLayer in "
            "every layer; use one method for all, or write these members"
        )
    return found


@functools.partial(jax.jit, static_argnames=("batch", "width", "dtype", "call", "target"))
def empty_prompt(batch: int, width: int, dtype: Any, call: LayerCall, target: Target) -> LayerPrompt | Any:
    """Makes the state of a layer before the first chunk of a prompt of up to `width` tokens."""
    c, needs = target.config, call.layer.needs

    def zeros(*axes: int) -> Array:
        return constrain(jnp.zeros((batch, c.kv_heads, *axes, c.head_dim), dtype), "B K", target.mesh)

    if needs.prompt_chunk:
        nothing = KVBlock(zeros(0), zeros(0), jnp.zeros((batch, 1, 0), jnp.int32))
        return sharded_layer.prefill(call.layer, nothing, None, call.num_slots, target.mesh)
    hidden = jnp.zeros((batch, 1, width, c.width), dtype) if needs.hidden_states else None
    num_observed = width if needs.observed_queries is None else needs.observed_queries
    return LayerPrompt(zeros(width), zeros(width), zeros(c.groups, num_observed), hidden)


@functools.partial(jax.jit, static_argnames=("call", "target"))
def _measure_prompt(prompt: LayerPrompt, lengths: Array, call: LayerCall, target: Target) -> Any:
    """Arrays [B ..], what this layer's part of a budget is derived from (CAKE)."""
    (layer,) = _budgeted([call.layer])
    return sharded_layer.measure(layer, *observed_block(call.layer, prompt, lengths), target.mesh)


@functools.partial(jax.jit, static_argnames="plan")
def _divide_budget(measures: Any, lengths: Array, plan: Plan) -> Array:
    return _budgeted(plan)[0].divide_budget(measures, lengths)


@functools.partial(jax.jit, static_argnames=("call", "capacity", "target"))
def compress(
    prompt: LayerPrompt, lengths: Array, num_kept: Array | None, call: LayerCall, capacity: int, target: Target
) -> Any:
    """Turns one layer's exact prompt into its cache state."""
    return encode_prompt(call, prompt, lengths, capacity, target.mesh, num_kept)


@functools.partial(jax.jit, static_argnames="width")
def _copy_chunk(
    copied: Array, lengths: Array, text: Array, start: Array, first: Array, width: int
) -> tuple[Array, Array]:
    """Makes the tokens with which each sequence repeats a chunk: i32[B width], and how many are real, i32[B].

    copied: i32[B C], tokens from `first` on, those before `start` as a lead. A sequence that ends before the chunk
    repeats nothing.
    """
    B, C = copied.shape
    copy = jnp.concatenate([jnp.broadcast_to(text, (B, len(text))), copied], 1)
    num_tokens = jnp.where(lengths > start, len(text) + jnp.clip(lengths - first, 0, C), 0)
    return jnp.pad(copy, [(0, 0), (0, width - copy.shape[1])]), num_tokens


@jax.jit
def take_last(hidden: Array, lengths: Array | None) -> Array:
    """hidden [B T D] of each sequence's last token, that at lengths - 1 or, without lengths, the last of all: [B D]."""
    last = jnp.full(hidden.shape[:1], hidden.shape[1] - 1, jnp.int32) if lengths is None else lengths - 1
    return take_tokens(hidden, last[:, None])[:, 0]


@jax.jit
def _keep_last(hidden: Array, lengths: Array, start: Array, earlier: Array) -> Array:
    """hidden [B C D] of the token at lengths - 1 where that is in this chunk, otherwise earlier [B D]."""
    at = lengths - 1 - start
    is_here = (at >= 0) & (at < hidden.shape[1])
    return jnp.where(
        is_here[:, None], take_tokens(hidden, jnp.clip(at, 0, hidden.shape[1] - 1)[:, None])[:, 0], earlier
    )


@jax.jit
def _output_projection(layer_params: Any) -> Array:
    return layer_params["attention"]["o"]["kernel"][None]
