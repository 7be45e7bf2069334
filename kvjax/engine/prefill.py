"""Prompts into caches: one driver for every method."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Float, Float32, Int32

from kvjax.cache.eviction.budget_allocation import round_up_shared
from kvjax.cache.protocol import BoundLayer, BudgetedLayer, Cache, num_layer_slots
from kvjax.cache.reading_layer import ReadingLayer
from kvjax.core.attention import MASKED_LOGIT
from kvjax.core.mesh import per_device, to_numpy, vary
from kvjax.core.types import Array
from kvjax.engine.forward import (
    Plan,
    Progress,
    Target,
    embed,
    embed_at,
    layer_calls,
    outer_params,
    run_layers,
    scan_if_traced,
)
from kvjax.engine.layer_prompt import (
    LayerCall,
    LayerPrompt,
    begin_prompt,
    compress_prompt,
    observed_block,
    truncate_prompt,
)
from kvjax.engine.modes import ChunkedPrefill, FullPrefill, PromptReplay
from kvjax.engine.positions import token_positions
from kvjax.errors import KvjaxError
from kvjax.models.decoder import output_projection_of, sinks_of, take_tokens

SHORT_PROMPT_TOKENS = 512
"""Prompts up to this length compute all outputs of the last layer too, so that it reuses the other layers' compiled
program."""

ReplayPrompts = tuple[Sequence[int], Sequence[int]]
"""Ids that come before the first and before every later chunk that the model is made to repeat (KVzip)."""


def prefill(
    params: Any,
    tokens: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
    plan: Plan,
    target: Target,
    capacity: int,
    *,
    chunk: int | None = None,
    num_slots: tuple[int, ...] | None = None,
    replay_prompts: ReplayPrompts = ((), ()),
    progress: Progress = iter,
) -> tuple[Float32[Array, "B V"], Cache]:
    """Runs prompts and compresses them.

    Args:
      params: the decoder's parameters.
      tokens: ids, left-aligned, padded on the right.
      lengths: of the prompts, at least 1.
      plan: a method bound to each layer.
      target: model configuration, mesh and compiled functions.
      capacity: tokens that a sequence of the cache may grow to.
      chunk: tokens run at a time; None: all at once, or as the method asks.
      num_slots: of each layer's state; None: enough for prompts of T tokens.
      replay_prompts: see `ReplayPrompts`.
      progress: wraps the indices of the chunks, for a bar; used where the chunks are a Python loop.

    Returns:
      Logits of each prompt's last token, and the cache.
    """
    T = tokens.shape[1]
    if num_slots is None:
        num_slots = tuple(num_layer_slots(layer, (min(T, capacity),), capacity) for layer in plan)
    calls, needs = layer_calls(plan, target.config, num_slots), [layer.needs for layer in plan]
    chunk = chunk or min((n.prompt_chunk for n in needs if n.prompt_chunk), default=None)
    if chunk is None and not any(n.global_budget or n.replay or n.paired_layer for n in needs):
        # One pass: each layer's exact keys and values exist only until its state has been made of them.
        observed = [n.observed_queries for n in needs]
        num_observed: int | None = None
        if None not in observed and T > SHORT_PROMPT_TOKENS:
            num_observed = max(1, *(n for n in observed if n is not None))
            calls = *calls[:-1], dataclasses.replace(calls[-1], selects_queries=True)
        hidden, angles, _ = embed(outer_params(params), tokens, None, None, target=target)
        mode, nothing = FullPrefill(lengths, capacity, num_observed), (None,) * len(plan)
        hidden, states = run_layers(params, hidden, angles, mode, calls, nothing, target=target)
        hidden = take_last(hidden, lengths if num_observed is None else None)
    else:
        hidden, prompts = prefill_exactly(
            params,
            tokens,
            lengths,
            calls,
            target,
            chunk=chunk,
            replay_prompts=replay_prompts,
            progress=progress,
        )
        states = compress_prompts(prompts, lengths, calls, capacity, target.mesh)
    logits = target.unembed(outer_params(params), hidden, target=target)
    # Arrays of zeros are constants until the first token is written, and a caller's loop needs one type throughout.
    return logits, vary(Cache(states, lengths, capacity, plan, target.config, params["embedding"].dtype.name))


def empty(plan: Plan, target: Target, batch: int, capacity: int, dtype: Any) -> Cache:
    """Makes the cache of `batch` sequences that have no token yet; see `kvjax.functional.empty`."""
    c, lengths = target.config, jnp.zeros(batch, jnp.int32)
    num_slots = tuple(num_layer_slots(layer, (0,), capacity) for layer in plan)
    prompts, calls = [], layer_calls(plan, c, num_slots)
    for call in calls:
        prompt = empty_prompt(batch=batch, width=min(capacity, 64), dtype=dtype, call=call, target=target)
        needs = call.layer.needs
        if needs.output_projection and not needs.prompt_chunk:
            shape = (1, *prompt.q.shape[1:3], prompt.v.shape[3], c.width)
            prompt = prompt._replace(output_projection=jnp.zeros(shape, dtype))
        if needs.replay:
            prompt = prompt._replace(replay_scores=jnp.zeros(prompt.k.shape[:3], jnp.float32))
        assert call.kind is not None
        if call.kind.attention.sinks and isinstance(prompt, LayerPrompt):
            # The parameters are not here, so that a state that keeps the sinks of its layer (`recompress`) has its
            # shapes, and sinks that take nothing.
            prompt = prompt._replace(sinks=jnp.full((1, *prompt.q.shape[1:3]), MASKED_LOGIT, dtype))
        prompts.append(prompt)
    states = compress_prompts(prompts, lengths, calls, capacity, target.mesh, longest=0)
    return vary(Cache(states, lengths, capacity, plan, c, jnp.dtype(dtype).name))


def prefill_exactly(
    params: Any,
    tokens: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
    calls: Sequence[LayerCall],
    target: Target,
    *,
    chunk: int | None = None,
    replay_prompts: ReplayPrompts = ((), ()),
    progress: Progress = iter,
) -> tuple[Float[Array, "B D"], list[LayerPrompt | Any]]:
    """Runs prompts and keeps each layer's exact keys and values, with all that its method observes.

    Arguments are those of `prefill`, with the `layer_calls` in place of the plan. A layer whose method is fed the
    prompt chunk by chunk holds its cache state.

    Returns:
      The hidden vector of each prompt's last token, and what each layer holds: a list, so that a caller that uses up a
      layer's prompt can drop it.
    """
    B, T = tokens.shape
    chunk = chunk or T
    dtype, outer = params["embedding"].dtype, outer_params(params)
    states = tuple(empty_prompt(batch=B, width=T, dtype=dtype, call=call, target=target) for call in calls)

    def run_chunk(carry: tuple[Any, Array], xs: tuple[Array | np.int32, Array]) -> tuple[Any, None]:
        (states, last), (start, chunk_tokens) = carry, xs
        hidden, angles, _ = embed(outer, chunk_tokens, start, None, target=target)
        mode = ChunkedPrefill(start, lengths)
        hidden, states = run_layers(params, hidden, angles, mode, calls, states, target=target)
        return (states, _update_last(last, hidden, lengths, start)), None

    # The last chunk may be shorter: one that reached beyond the prompt's padding would overflow the slots of a method
    # that is fed chunk by chunk.
    carry, num_chunks = vary((states, np.zeros((B, target.config.width), dtype))), T // chunk
    if num_chunks > 1:
        starts = np.arange(0, num_chunks * chunk, chunk, dtype=np.int32)
        chunks = tokens[:, : num_chunks * chunk].reshape(B, num_chunks, chunk).swapaxes(0, 1)
        carry, _ = scan_if_traced(run_chunk, carry, (starts, chunks), progress)
    elif num_chunks:
        carry, _ = run_chunk(carry, (np.int32(0), tokens[:, :chunk]))
    if T % chunk:
        carry, _ = run_chunk(carry, (np.int32(num_chunks * chunk), tokens[:, num_chunks * chunk :]))
    prompts, hidden = carry
    if any(call.layer.needs.replay for call in calls):
        prompts = replay(params, tokens, lengths, prompts, calls, target, replay_prompts=replay_prompts)
    prompts = list(prompts)
    for i, layer in enumerate(call.layer for call in calls):
        if layer.needs.output_projection and not layer.needs.prompt_chunk:
            output_projection = output_projection_of(params[f"layer_{i}"], target.config.kind(i))
            prompts[i] = prompts[i]._replace(output_projection=output_projection[None])
        if isinstance(prompts[i], LayerPrompt):
            prompts[i] = prompts[i]._replace(sinks=sinks_of(params[f"layer_{i}"]))
    return hidden, prompts


def replay(
    params: Any,
    tokens: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
    prompts: Sequence[LayerPrompt],
    calls: Sequence[LayerCall],
    target: Target,
    *,
    replay_prompts: ReplayPrompts,
) -> tuple[LayerPrompt, ...]:
    """Runs the prompt a second time, chunk by chunk after itself, for the scores of KVzip.

    Arguments are those of `prefill_exactly`; `prompts` is its result. Returns the prompts with their `replay_scores`.
    """
    copies = copy_chunks(tokens, lengths, [call.layer for call in calls], replay_prompts)
    # No slots are made here, so that prompts of all sizes share one program.
    calls, outer = [dataclasses.replace(call, num_slots=0) for call in calls], outer_params(params)
    prompts = tuple(
        prompt._replace(replay_scores=jnp.zeros(prompt.k.shape[:3], jnp.float32)) if call.layer.needs.replay else prompt
        for call, prompt in zip(calls, prompts, strict=True)
    )
    for copy in copies:
        hidden, angles = embed_at(outer, copy.tokens, copy.pos, target=target)
        mode = PromptReplay(copy.start, copy.pos, lengths)
        _, prompts = run_layers(params, hidden, angles, mode, calls, prompts, target=target)
    return prompts


class ChunkCopy(NamedTuple):
    """The tokens with which the model repeats one chunk of the prompts; they follow the whole prompts."""

    start: np.int32  # the chunk's first position in the prompts
    tokens: Int32[Array, "B W"]  # an instruction, the tokens that lead up to the chunk, the chunk
    pos: Int32[Array, "B W"]  # -1 for padding, and in sequences that end before the chunk


def copy_chunks(
    tokens: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
    layers: Sequence[BoundLayer],
    replay_prompts: ReplayPrompts,
) -> list[ChunkCopy]:
    """Copies the prompts chunk by chunk, for methods that score tokens by how the model repeats them (KVzip).

    Args:
      tokens: of the prompts, padded on the right.
      lengths: of the prompts.
      layers: of the model, whose `Needs.replay` says how long the chunks are.
      replay_prompts: see `ReplayPrompts`.

    Raises:
      KvjaxError: layers that ask for unlike copies, or do not read the whole prompt first.
    """
    replays = {layer.needs.replay for layer in layers} - {None}
    if len(replays) != 1 or any(layer.needs.prompt_chunk for layer in layers):
        raise KvjaxError("all layers repeat the prompt in one way, and read it whole before; use one method for all")
    (settings,) = replays
    assert settings is not None
    T, chunk, lead = tokens.shape[1], settings.chunk_tokens, settings.lead_tokens
    # Copies are padded to one width, so that all of them share one program.
    width, copies = max(map(len, replay_prompts)) + lead + min(chunk, T), []
    for start in range(0, T, chunk):
        instruction, first = np.asarray(replay_prompts[min(start, 1)], np.int32), max(start - lead, 0)
        copied = tokens[:, first : start + chunk]
        copy, pos = _copy_chunk(copied, lengths, instruction, np.int32(start), np.int32(first), width=width)
        copies.append(ChunkCopy(np.int32(start), copy, pos))
    return copies


def compress_prompts(
    prompts: list[LayerPrompt | Any],
    lengths: Int32[Array, " B"],
    calls: Sequence[LayerCall],
    capacity: int,
    mesh: Mesh | None = None,
    *,
    longest: int | None = None,
) -> tuple[Any, ...]:
    """Turns the exact prompts of all layers into cache states.

    Args:
      prompts: what each layer holds; the list is emptied, so that a layer's exact prompt is freed once it is used.
      lengths: of the prompts.
      calls: see `layer_calls`; their numbers of slots hold where layers divide no budget among them.
      capacity: tokens that a sequence of the cache may grow to.
      mesh: the devices that heads and sequences are split over, or None.
      longest: tokens of the longest prompt, where a caller knows it under a transformation; None: their width.

    Returns:
      The cache state of each layer.
    """
    plan = tuple(call.layer for call in calls)
    num_kept: list[Any] = [None] * len(plan)
    measures: list[Any] = [None] * len(plan)
    if shared := [i for i, layer in enumerate(plan) if layer.needs.global_budget]:
        calls = list(calls)
        budgeted = _budgeted_layers(plan, shared)
        measured = measure_layers([prompts[i] for i in shared], lengths, [calls[i] for i in shared], capacity, mesh)
        division = _divide_budget(tuple(measured), lengths, plan=budgeted)
        if isinstance(division, Tracer):
            # Under a transformation nobody knows what a layer will keep, so each has slots for the whole prompt.
            longest_prompt = min(prompts[0].k.shape[2], capacity) if longest is None else longest
            at_most = np.full(division.shape, longest_prompt)
        else:
            division = at_most = to_numpy(division)
            longest_prompt = int(to_numpy(lengths).max())
        headroom_tokens = -(-(capacity - longest_prompt) // 16) * 16  # in multiples, as in `num_layer_slots`
        needed = [layer.count_slots(num_tokens) for layer, num_tokens in zip(budgeted, at_most, strict=True)]
        for i, layer, num_needed, kept, measure in zip(shared, budgeted, needed, division, measured, strict=True):
            kept_slots = round_up_shared(num_needed, sum(needed) // len(needed), longest_prompt)
            resized, num_slots = layer.resize(kept_slots, headroom_tokens)
            calls[i] = dataclasses.replace(calls[i], layer=resized, num_slots=min(capacity, num_slots))
            num_kept[i], measures[i] = kept, measure
    states: list[Any] = []
    below = None
    while prompts:
        # A layer's exact keys and values are dropped as soon as no other layer has to see them.
        i, prompt = len(states), prompts.pop(0)
        needs = calls[i].layer.needs
        if needs.paired_layer:
            other = prompts[0] if needs.paired_layer > 0 else below  # the layer above or below (MiniCache)
            assert other is not None
            prompt = prompt._replace(paired=(other.k, other.v))
        below = prompt if prompts and calls[i + 1].layer.needs.paired_layer < 0 else None
        if isinstance(prompt, LayerPrompt):  # else a cache state already: fed through its method, or without tokens
            division = num_kept[i], measures[i]
            prompt = compress(prompt, lengths, *division, call=calls[i], capacity=capacity, mesh=mesh)
        measures[i] = None
        states.append(prompt)
    return tuple(states)


def measure_layers(
    prompts: Sequence[LayerPrompt],
    lengths: Int32[Array, " B"],
    calls: Sequence[LayerCall],
    capacity: int,
    mesh: Mesh | None = None,
) -> list[Any]:
    """Measures every layer's prompt, for a budget that all layers share (CAKE): for each layer arrays [B ..]."""
    return [
        _measure_prompt(prompt, lengths, call=dataclasses.replace(call, num_slots=0), capacity=capacity, mesh=mesh)
        for call, prompt in zip(calls, prompts, strict=True)
    ]


def stack_measures(measures: Sequence[Any]) -> Any:
    """Stacks the measures of all layers: arrays [L B ..]."""
    return jax.tree.map(lambda *layers: jnp.stack(layers), *measures)


def _budgeted_layers(plan: Sequence[BoundLayer], shared: Sequence[int]) -> tuple[BudgetedLayer, ...]:
    """The layers that divide a budget, by their indices in the plan."""
    if not all(isinstance(layer, BudgetedLayer) for layer in plan if not isinstance(layer, ReadingLayer)):
        raise KvjaxError(
            "some layers divide a budget among all, which takes the members of kvjax.cache.protocol.BudgetedLayer in "
            "every layer; use one method for all, or write these members"
        )
    return tuple(cast(BudgetedLayer, plan[i]) for i in shared)


@functools.partial(jax.jit, static_argnames=("batch", "width", "dtype", "call", "target"))
def empty_prompt(batch: int, width: int, dtype: Any, call: LayerCall, target: Target) -> LayerPrompt | Any:
    """Makes the state of a layer before the first chunk of a prompt of up to `width` tokens."""
    assert call.kind is not None
    a = call.kind.attention

    def tokens(*axes: int) -> Any:
        return jax.ShapeDtypeStruct((batch, *axes), dtype)

    q, k = tokens(a.kv_heads, a.groups, width, a.head_dim), tokens(a.kv_heads, width, a.head_dim)
    v, hidden = tokens(a.kv_heads, width, a.value_dim), tokens(width, target.config.width)
    return begin_prompt(call, q, k, v, hidden, target.mesh)


@functools.partial(jax.jit, static_argnames=("call", "capacity", "mesh"))
def _measure_prompt(prompt: LayerPrompt, lengths: Array, call: LayerCall, capacity: int, mesh: Mesh | None) -> Any:
    layer = cast(BudgetedLayer, call.layer)
    measure = per_device(layer.measure, *prompt.k.shape[:2], mesh=mesh)
    return measure(*observed_block(call.layer, truncate_prompt(call.layer, prompt, capacity), lengths))


@functools.partial(jax.jit, static_argnames="plan")
def _divide_budget(measures: tuple[Any, ...], lengths: Array, plan: tuple[BudgetedLayer, ...]) -> Array:
    # Stacked in the program, which leaves out what the division does not read: the scores of all tokens.
    return plan[0].divide_budget(stack_measures(measures), lengths)


@functools.partial(jax.jit, static_argnames=("call", "capacity", "mesh"))
def compress(
    prompt: LayerPrompt,
    lengths: Int32[Array, " B"],
    num_kept: Int32[Array, " B"] | Int32[Array, "B K"] | None,
    measure: Any,
    call: LayerCall,
    capacity: int,
    mesh: Mesh | None,
) -> Any:
    """Turns one layer's exact prompt into its cache state, as a program of its own."""
    return compress_prompt(call, prompt, lengths, capacity, mesh, num_kept, measure)


@functools.partial(jax.jit, static_argnames="width")
def _copy_chunk(
    copied: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    instruction: Int32[Array, " I"],
    start: Int32[Array, ""],
    first: Int32[Array, ""],
    width: int,
) -> tuple[Int32[Array, "B {width}"], Int32[Array, "B {width}"]]:
    """Returns the tokens of a copy and their positions; `copied` are the prompts' tokens from `first` on."""
    B, C = copied.shape
    copy = jnp.concatenate([jnp.broadcast_to(instruction, (B, len(instruction))), copied], 1)
    copy = jnp.pad(copy, [(0, 0), (0, width - copy.shape[1])])
    num_tokens = jnp.where(lengths > start, len(instruction) + jnp.clip(lengths - first, 0, C), 0)
    pos = token_positions(copy, num_tokens)
    return copy, jnp.where(pos >= 0, lengths[:, None] + pos, -1)


@jax.jit
def take_last(hidden: Float[Array, "B T D"], lengths: Int32[Array, " B"] | None) -> Float[Array, "B D"]:
    """Takes the hidden vector of each sequence's last token; without lengths, the last of all."""
    last = jnp.full(hidden.shape[:1], hidden.shape[1] - 1, jnp.int32) if lengths is None else lengths - 1
    return take_tokens(hidden, last[:, None])[:, 0]


@jax.jit
def _update_last(
    last: Float[Array, "B D"], hidden: Float[Array, "B C D"], lengths: Int32[Array, " B"], start: Int32[Array, ""]
) -> Float[Array, "B D"]:
    """Replaces `last` by the hidden vector of each sequence's last token, where this chunk has it."""
    at = lengths - 1 - start
    is_here = (at >= 0) & (at < hidden.shape[1])
    return jnp.where(is_here[:, None], take_tokens(hidden, jnp.clip(at, 0, hidden.shape[1] - 1)[:, None])[:, 0], last)
