"""Prompts into caches: one driver for every method."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Float, Float32, Int32

from kvjax.cache.eviction.budget_allocation import round_up_shared
from kvjax.cache.protocol import BudgetedLayer, Cache, Needs, TabulatedLayer, num_layer_slots, round_up_headroom
from kvjax.cache.reading_layer import ReadingLayer
from kvjax.cache.recurrent_layer import RecurrentLayer
from kvjax.core import memory
from kvjax.core.attention import MASKED_LOGIT, TileChoosing
from kvjax.core.mesh import per_device, to_numpy, vary
from kvjax.core.types import Array
from kvjax.engine.forward import (
    BoundLayers,
    Progress,
    Target,
    embed,
    layer_angles,
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
from kvjax.engine.modes import ChunkedPrefill, FullPrefill
from kvjax.engine.replay import (
    PROMPTS_OF_ALL_LAYERS,
    ReplayPrompts,
    RunningCopy,
    begin_replay,
    replay_layer,
    replay_with_gradients,
)
from kvjax.errors import KvjaxError
from kvjax.models.decoder import output_projection_of, sinks_of, take_tokens

SHORT_PROMPT_TOKENS = 512
"""Prompts up to this length compute all outputs of the last layer too, so that it reuses the other layers' compiled
program."""

# A program of its own, where layers are compressed one by one.
compress = jax.jit(compress_prompt, static_argnames=("call", "capacity", "mesh"))


def prefill(
    params: Any,
    tokens: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
    plan: BoundLayers,
    target: Target,
    capacity: int,
    *,
    chunk: int | None = None,
    num_slots: tuple[int, ...] | None = None,
    replay_prompts: ReplayPrompts = ((), ()),
    prompt_memory: str = "device",
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
      prompt_memory: "device", or "host" for pinned host memory: where exact keys and values wait that are compressed
        when all layers, or the next one, have read the prompts.
      progress: wraps the indices of layers or chunks, for a bar; used where these are a Python loop.

    Returns:
      Logits of each prompt's last token, and the cache.

    Raises:
      KvjaxError: prompt_memory="host" under a transformation, for a method that needs gradients, or where there is no
        such memory; chunks that cut through the tiles of a pattern.
    """
    T = tokens.shape[1]
    if num_slots is None:
        num_slots = tuple(num_layer_slots(layer, (min(T, capacity),), capacity) for layer in plan)
    calls = layer_calls(plan, target.config, num_slots)
    # A method asks nothing of layers with a recurrence, which read prompts in any way.
    needs = [layer.needs for layer in plan if not isinstance(layer, RecurrentLayer)]
    # A method that is fed chunks reads endless texts, so that no layer may wait for the hidden vectors of all tokens.
    is_fed = all(n.prompt_chunk for n in needs)
    chunk = chunk or min((n.prompt_chunk for n in needs if n.prompt_chunk), default=None)
    waits = any(n.global_budget or n.replay or n.paired_layer for n in needs)
    require_whole_tiles(needs, T if chunk is None else chunk, T)
    if waits and not is_fed and prompt_memory == "host":
        hidden, states = prefill_through_host(
            params,
            tokens,
            lengths,
            calls,
            target,
            capacity,
            chunk=chunk,
            replay_prompts=replay_prompts,
            progress=progress,
        )
    elif is_fed or waits:
        # All layers run a chunk before the next one: each is fed it, or layers have to see each other's prompts.
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
    elif chunk is not None:

        def finish(call: LayerCall, prompt: LayerPrompt) -> Any:
            return compress(call, prompt, lengths, capacity, target.mesh)

        hidden, layers = prefill_by_layer(
            params, tokens, lengths, calls, target, chunk=chunk, finish=finish, progress=progress
        )
        states = tuple(layers)
    else:
        # One pass: each layer's exact keys and values exist only until its state has been made of them.
        observed = [n.observed_queries for n in needs]
        num_observed: int | None = None
        # A pattern that chooses keys for whole tiles of queries needs all of them, in the last layer too.
        chooses_tiles = any(isinstance(n.prompt_pattern, TileChoosing) for n in needs)
        if None not in observed and T > SHORT_PROMPT_TOKENS and not chooses_tiles:
            num_observed = max(1, *(n for n in observed if n is not None))
            calls = *calls[:-1], dataclasses.replace(calls[-1], selects_queries=True)
        hidden, angles, _ = embed(outer_params(params), tokens, None, None, target=target)
        mode = FullPrefill(lengths, capacity, num_observed)
        selections = share_selections(calls, lengths, (params, tokens), min(T, capacity), target.mesh)
        hidden, states = run_and_store(params, hidden, angles, mode, calls, selections, target)
        hidden = take_last(hidden, lengths if num_observed is None else None)
    logits = target.unembed(outer_params(params), hidden, target=target)
    # Arrays of zeros are constants until the first token is written, and a caller's loop needs one type throughout.
    return logits, vary(Cache(states, lengths, capacity, plan, target.config, params["embedding"].dtype.name))


class SharedSelection(NamedTuple):
    """A layer's part in a selection whose program all layers of a table share: see `TabulatedLayer`."""

    call: LayerCall  # of the selector
    num_kept: Int32[Array, "B K"]  # tokens of each head
    layer: TabulatedLayer  # stores what was selected, in slots of its own number
    num_slots: int
    side_slots: int

    def store(self, selected: Any) -> Any:
        """Makes the layer's state of what the selector placed."""
        return store_selected(selected, self.layer, self.num_slots, self.side_slots)


@functools.partial(jax.jit, static_argnames=("layer", "num_slots", "side_slots"))
def store_selected(selected: Any, layer: TabulatedLayer, num_slots: int, side_slots: int) -> Any:
    return layer.store_selected(selected, num_slots, side_slots)


def share_selections(
    calls: Sequence[LayerCall], lengths: Int32[Array, " B"], arrays: Any, width: int, mesh: Mesh | None
) -> dict[int, SharedSelection]:
    """Finds the layers that can share the program of their selection, since a table says what their heads keep.

    If each of these layers had a program of its own, thirty layers would take as long to compile as thirty methods.

    Args:
      calls: see `layer_calls`.
      lengths: of the prompts.
      arrays: all others of this pass. Where one is traced, all layers are in a caller's program, and share none.
      width: slots of the prompts, up to the capacity.
      mesh: the devices that heads and sequences are split over. There layers share none: the number of a layer's pages
        decides which device has a page.

    Returns:
      The part of each such layer, by its index.
    """
    if mesh is not None or any(isinstance(x, Tracer) for x in jax.tree.leaves((lengths, arrays))):
        return {}
    layers = {
        i: call.layer
        for i, call in enumerate(calls)
        if isinstance(call.layer, TabulatedLayer) and call.layer.selector is not None
    }
    # Equal layers share their programs as they are.
    if len(set(layers.values())) < 2:
        return {}
    known_lengths = to_numpy(lengths)
    side_slots = {i: layer.num_side_slots(width, calls[i].num_slots) for i, layer in layers.items()}
    most = max(side_slots.values())
    return {
        i: SharedSelection(
            call=dataclasses.replace(calls[i], layer=layer.selector, num_slots=most),
            num_kept=jnp.asarray(layer.tokens_of_heads(known_lengths)),
            # What acts on prompts alone would tell layers apart, and has done its work when they store.
            layer=getattr(layer, "after_prompt", layer),
            num_slots=calls[i].num_slots,
            side_slots=side_slots[i],
        )
        for i, layer in layers.items()
    }


def run_and_store(
    params: Any,
    hidden: Float[Array, "B T D"],
    angles: Any,
    mode: FullPrefill,
    calls: Sequence[LayerCall],
    selections: Mapping[int, SharedSelection],
    target: Target,
) -> tuple[Float[Array, "B Q D"], tuple[Any, ...]]:
    """Runs whole prompts through all layers, each of which makes its state at once, or by its `SharedSelection`."""
    if not selections or any(call.is_read for call in calls):
        return run_layers(params, hidden, angles, mode, calls, (None,) * len(calls), target=target)
    states = []
    for i, call in enumerate(calls):
        selection, own_mode = selections.get(i), mode
        if selection is not None:
            call, own_mode = selection.call, dataclasses.replace(mode, num_kept=selection.num_kept)
        hidden, (state,) = run_layers(params, hidden, angles, own_mode, [call], [None], target=target, first_layer=i)
        # Stored before the next layer runs: the places that a layer does not need would stay for all of them.
        states.append(state if selection is None else selection.store(state))
    return hidden, tuple(states)


def require_whole_tiles(needs: Iterable[Needs], chunk: int, num_tokens: int) -> None:
    """Raises KvjaxError where chunks of prompts of `num_tokens` would cut through a pattern's tiles of queries."""
    for pattern in (n.prompt_pattern for n in needs):
        if isinstance(pattern, TileChoosing) and chunk < num_tokens and chunk % pattern.tile:
            raise KvjaxError(
                f"{type(pattern).__name__} (component `attend`) chooses keys for {pattern.tile} queries at a "
                f"time, and chunks of {chunk} tokens would cut through them; give a chunk that is a multiple"
            )


def empty(plan: BoundLayers, target: Target, batch: int, capacity: int, dtype: Any) -> Cache:
    """Makes the cache of `batch` sequences that have no token yet; see `kvjax.functional.empty`."""
    c, lengths = target.config, jnp.zeros(batch, jnp.int32)
    num_slots = tuple(num_layer_slots(layer, (0,), capacity) for layer in plan)
    prompts, calls = [], layer_calls(plan, c, num_slots)
    for call in calls:
        prompt = empty_prompt(batch=batch, width=min(capacity, 64), dtype=dtype, call=call, target=target)
        if isinstance(prompt, LayerPrompt):
            assert call.kind is not None
            needs, heads = call.layer.needs, prompt.q.shape[1:3]
            projection = (1, *heads, prompt.v.shape[3], c.width)
            # The parameters are not here. A state that keeps the sinks of its layer (`recompress`) gets its shapes, and
            # sinks that take nothing.
            prompt = prompt._replace(
                output_projection=jnp.zeros(projection, dtype) if needs.output_projection else None,
                replay_scores=jnp.zeros(prompt.k.shape[:3], jnp.float32) if needs.replay else None,
                sinks=jnp.full((1, *heads), MASKED_LOGIT, dtype) if call.kind.attention.sinks else None,
            )
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
    copies = begin_replay(params, tokens, lengths, calls, target, replay_prompts=replay_prompts)
    prompts = dict(enumerate(prompts))
    if any(call.layer.needs.differentiates_replay for call in calls):
        prompts = replay_with_gradients(params, prompts, copies, calls, target)
        copies = []
    for i, call in enumerate(calls):
        prompt = replay_layer(params, i, prompts[i], copies, prompts, call, target)
        prompts[i] = _add_parameters(prompt, call, params[f"layer_{i}"])
    return hidden, list(prompts.values())


def _add_parameters(prompt: LayerPrompt | Any, call: LayerCall, params: Any) -> LayerPrompt | Any:
    """Adds what a layer's method observes of the layer's parameters to its prompt."""
    if not isinstance(prompt, LayerPrompt):
        return prompt
    assert call.kind is not None
    projection = output_projection_of(params, call.kind)[None] if call.layer.needs.output_projection else None
    return prompt._replace(output_projection=projection, sinks=sinks_of(params))


class PromptChunk(NamedTuple):
    """Tokens that run through a layer at once; or several such chunks, one more axis in front of each array."""

    start: Int32[Array, "..."] | np.int32  # position of the first token
    tokens: Any  # ids [B C], or what the layer below made of them: (hidden vectors [B C D], angles)


def prefill_by_layer(
    params: Any,
    tokens: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
    calls: Sequence[LayerCall],
    target: Target,
    *,
    chunk: int,
    finish: Callable[[LayerCall, LayerPrompt], Any],
    copies: Sequence[RunningCopy] = (),
    progress: Progress = iter,
) -> tuple[Float[Array, "B D"], list[Any]]:
    """Runs all chunks of the prompts through a layer, and finishes it, before the layer above.

    The hidden vectors of all tokens are held, one layer's exact keys and values, and the activations of one chunk. In
    the other order, each chunk through all layers, the exact keys and values of all layers would be.

    Args:
      params, tokens, lengths, target, chunk, progress: as in `prefill`.
      calls: see `layer_calls`.
      finish: makes what is held of a layer from its exact prompt.
      copies: what each layer reads after the prompts, see `begin_replay`.

    Returns:
      The hidden vector of each prompt's last token, and what is held of each layer.
    """
    (B, T), outer, dtype = tokens.shape, outer_params(params), params["embedding"].dtype
    starts, num_equal = np.arange(0, T, chunk, dtype=np.int32), T // chunk
    chunks: list[Any] = [PromptChunk(start, tokens[:, start : start + chunk]) for start in starts]
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((params, tokens, lengths)))
    if is_traced and num_equal > 1:
        # One scan: inside a caller's program the number of chunks must not add to what is compiled.
        chunks[:num_equal] = [jax.tree.map(lambda *x: jnp.stack(x), *chunks[:num_equal])]

    def embed_chunk(_: None, chunk: PromptChunk) -> tuple[None, PromptChunk]:
        hidden, angles, _ = embed(outer, chunk.tokens, chunk.start, None, target=target)
        return None, chunk._replace(tokens=(hidden, angles))

    def run_chunk(layer: int, source: Any, state: Any, chunk: PromptChunk) -> tuple[Any, PromptChunk]:
        (hidden, angles), mode = chunk.tokens, ChunkedPrefill(chunk.start, lengths)
        own_angles = layer_angles(params, angles, layer, target)
        hidden, state, _, _ = target.run_layer(
            params[f"layer_{layer}"], hidden, own_angles, mode, state, None, source, call=calls[layer], target=target
        )
        return state, chunk._replace(tokens=(hidden, angles))

    def update_last(last: Array, chunk: PromptChunk) -> tuple[Array, None]:
        return _update_last(last, chunk.tokens[0], lengths, chunk.start), None

    _replace_chunks(embed_chunk, None, chunks)
    states, exact = [], {}  # exact: the prompts of layers whose keys and values others read
    for i in progress(range(len(calls))):
        call, kind = calls[i], target.config.kind(i)
        source = None if kind.attention.reads_layer is None else (exact[kind.attention.reads_layer], None)
        prompt = vary(empty_prompt(batch=B, width=T, dtype=dtype, call=call, target=target))
        if is_traced:  # else XLA makes the empty arrays of all layers before it runs the first one
            prompt, chunks, states = lax.optimization_barrier((prompt, chunks, states))
        prompt = _replace_chunks(functools.partial(run_chunk, i, source), prompt, chunks)
        prompt = replay_layer(params, i, prompt, copies, exact, call, target)
        prompt = _add_parameters(prompt, call, params[f"layer_{i}"])
        if call.is_read:
            exact[i] = prompt
        # What is no exact prompt is a cache state already: fed through its method, or without tokens.
        prompt = finish(call, prompt) if isinstance(prompt, LayerPrompt) else prompt
        states.append(prompt)
    return _replace_chunks(update_last, vary(np.zeros((B, target.config.width), dtype)), chunks), states


def _replace_chunks(step: Callable[[Any, PromptChunk], tuple[Any, Any]], carry: Any, chunks: list[Any]) -> Any:
    """Runs a step over chunks in their order, and puts its result in the place of each."""
    for i, chunk in enumerate(chunks):
        carry, chunks[i] = lax.scan(step, carry, chunk) if np.ndim(chunk.start) else step(carry, chunk)
    return carry


def prefill_through_host(
    params: Any,
    tokens: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
    calls: Sequence[LayerCall],
    target: Target,
    capacity: int,
    *,
    chunk: int | None = None,
    replay_prompts: ReplayPrompts = ((), ()),
    progress: Progress = iter,
) -> tuple[Float[Array, "B D"], tuple[Any, ...]]:
    """Runs prompts layer by layer, while the exact keys and values of the layers that have read them lie on the host.

    They are measured before, and come back one layer at a time to be compressed. Arguments are those of `prefill`, with
    the `layer_calls` in place of the plan; so are the Raises.

    Returns:
      The hidden vector of each prompt's last token, and the cache states.
    """
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((params, tokens, lengths))):
        raise KvjaxError(
            'prompt_memory="host" moves keys and values between two programs, and a transformation makes one program '
            'of all; call it outside of jit, vmap and grad, or leave prompt_memory at "device"'
        )
    if any(call.layer.needs.differentiates_replay for call in calls):
        raise KvjaxError(PROMPTS_OF_ALL_LAYERS)
    memory.require_host_memory()
    measures = []

    def move_to_host(call: LayerCall, prompt: LayerPrompt) -> Any:
        if call.layer.needs.global_budget:
            measures.extend(measure_layers([prompt], lengths, [call], capacity, target.mesh))
        # Waited for: programs are started long before they run, and each would take its memory when it is started.
        return jax.block_until_ready(memory.move(prompt, "pinned_host"))

    copies = begin_replay(params, tokens, lengths, calls, target, replay_prompts=replay_prompts)
    hidden, prompts = prefill_by_layer(
        params,
        tokens,
        lengths,
        calls,
        target,
        chunk=chunk or tokens.shape[1],
        finish=move_to_host,
        copies=copies,
        progress=progress,
    )
    del copies
    return hidden, compress_prompts(prompts, lengths, calls, capacity, target.mesh, measures=measures)


def compress_prompts(
    prompts: list[LayerPrompt | Any],
    lengths: Int32[Array, " B"],
    calls: Sequence[LayerCall],
    capacity: int,
    mesh: Mesh | None = None,
    *,
    longest: int | None = None,
    measures: Sequence[Any] | None = None,
) -> tuple[Any, ...]:
    """Turns the exact prompts of all layers into cache states.

    Args:
      prompts: what each layer holds, on the device or on the host; the list is emptied, so that a layer's exact prompt
        is freed once it is used.
      lengths: of the prompts.
      calls: see `layer_calls`; their numbers of slots hold where layers divide no budget among them.
      capacity: tokens that a sequence of the cache may grow to.
      mesh: the devices that heads and sequences are split over, or None.
      longest: tokens of the longest prompt, where a caller knows it under a transformation; None: their width.
      measures: of the layers that divide a budget, see `measure_layers`; None: they are measured here, on the device.

    Returns:
      The cache state of each layer.
    """
    parts = [BudgetPart()] * len(calls)
    if any(call.layer.needs.global_budget for call in calls):
        calls, parts = _divide_budget(prompts, lengths, calls, capacity, mesh, longest, measures)
    exact = [prompt for prompt in prompts if isinstance(prompt, LayerPrompt)]
    width = max((min(prompt.k.shape[2], capacity) for prompt in exact), default=0)
    selections = share_selections(calls, lengths, exact, width, mesh)
    del exact  # or the layers' prompts would stay until all are compressed
    states: list[Any] = []
    below = None
    while prompts:
        # A layer's exact keys and values are dropped as soon as no other layer has to see them.
        call, part, prompt = calls[len(states)], parts.pop(0), _load_prompt(prompts.pop(0))
        paired_layer = call.layer.needs.paired_layer
        if paired_layer:
            other = _load_prompt(prompts[0]) if paired_layer > 0 else below  # the layer above or below (MiniCache)
            assert other is not None
            prompt = prompt._replace(paired=(other.k, other.v))
        below = prompt if prompts and calls[len(states) + 1].layer.needs.paired_layer < 0 else None
        if isinstance(prompt, LayerPrompt):  # else a cache state already: fed through its method, or without tokens
            selection = selections.get(len(states))
            if selection is not None:
                call, part = selection.call, BudgetPart(selection.num_kept)
            prompt = compress(call, prompt, lengths, capacity, mesh, *part)
            if selection is not None:
                prompt = selection.store(prompt)
        states.append(prompt)
    return tuple(states)


def _load_prompt(prompt: LayerPrompt | Any) -> LayerPrompt | Any:
    """Copies a prompt that lies on the host to its devices."""
    is_on_host = isinstance(prompt, LayerPrompt) and memory.is_host(prompt.k)
    return jax.block_until_ready(memory.move(prompt, "device")) if is_on_host else prompt


class BudgetPart(NamedTuple):
    """A layer's part of a budget that all layers divide (CAKE); None in a layer that divides none."""

    num_kept: Int32[Array, " B"] | Int32[Array, "B K"] | None = None  # tokens of the layer, or of each of its heads
    measure: Any = None  # what the layer has measured of the prompt


def _divide_budget(
    prompts: Sequence[LayerPrompt | Any],
    lengths: Int32[Array, " B"],
    calls: Sequence[LayerCall],
    capacity: int,
    mesh: Mesh | None,
    longest: int | None,
    measures: Sequence[Any] | None,
) -> tuple[list[LayerCall], list[BudgetPart]]:
    """Divides one budget among the layers that ask for it, by what each of them measures of its prompt.

    Arguments are those of `compress_prompts`. Returns the calls with the slots that each layer needs, and the parts.
    """
    if not all(isinstance(call.layer, BudgetedLayer | ReadingLayer | RecurrentLayer) for call in calls):
        raise KvjaxError(
            "some layers divide a budget among all, which takes the members of kvjax.cache.protocol.BudgetedLayer in "
            "every layer; use one method for all, or write these members"
        )
    calls, parts = list(calls), [BudgetPart()] * len(calls)
    shared = [i for i, call in enumerate(calls) if call.layer.needs.global_budget]
    layers = tuple(cast(BudgetedLayer, calls[i].layer) for i in shared)
    if measures is None:
        measures = measure_layers([prompts[i] for i in shared], lengths, [calls[i] for i in shared], capacity, mesh)
    num_kept = most_kept = allocate_tokens(tuple(measures), lengths, layers=layers)
    if isinstance(num_kept, Tracer):
        # Under a transformation nobody knows what a layer will keep, so each has slots for the whole prompt.
        num_tokens = min(prompts[shared[0]].k.shape[2], capacity) if longest is None else longest
        most_kept = np.full(num_kept.shape, num_tokens)
    else:
        num_kept = most_kept = to_numpy(num_kept)
        num_tokens = int(to_numpy(lengths).max())
    headroom_tokens = round_up_headroom(capacity - num_tokens)
    kept_slots = [layer.count_slots(tokens) for layer, tokens in zip(layers, most_kept, strict=True)]
    for i, layer, slots in zip(shared, layers, kept_slots, strict=True):
        slots = round_up_shared(slots, sum(kept_slots) // len(kept_slots), num_tokens)
        resized, num_slots = layer.resize(slots, headroom_tokens)
        calls[i] = dataclasses.replace(calls[i], layer=resized, num_slots=min(capacity, num_slots))
    for i, kept, measure in zip(shared, num_kept, measures, strict=True):
        parts[i] = BudgetPart(kept, measure)
    return calls, parts


def measure_layers(
    prompts: Sequence[LayerPrompt],
    lengths: Int32[Array, " B"],
    calls: Sequence[LayerCall],
    capacity: int,
    mesh: Mesh | None = None,
) -> list[Any]:
    """Measures every layer's prompt, for a budget that all layers share (CAKE): for each layer arrays [B ..]."""
    return [
        measure_prompt(prompt, lengths, call=dataclasses.replace(call, num_slots=0), capacity=capacity, mesh=mesh)
        for call, prompt in zip(calls, prompts, strict=True)
    ]


def stack_measures(measures: Sequence[Any]) -> Any:
    """Stacks the measures of all layers: arrays [L B ..]."""
    return jax.tree.map(lambda *layers: jnp.stack(layers), *measures)


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
def measure_prompt(prompt: LayerPrompt, lengths: Array, call: LayerCall, capacity: int, mesh: Mesh | None) -> Any:
    layer = cast(BudgetedLayer, call.layer)
    measure = per_device(layer.measure, *prompt.k.shape[:2], mesh=mesh)
    return measure(*observed_block(call.layer, truncate_prompt(call.layer, prompt, capacity), lengths))


@functools.partial(jax.jit, static_argnames="layers")
def allocate_tokens(measures: tuple[Any, ...], lengths: Array, layers: tuple[BudgetedLayer, ...]) -> Array:
    # Stacked in the program, which leaves out what the division does not read: the scores of all tokens.
    return layers[0].divide_budget(stack_measures(measures), lengths)


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
