"""The second pass over a prompt that some methods ask for: the model repeats it, chunk by chunk (KVzip).

A method may also ask how much the result depends on each layer (`Replay.needs_gradients`, KVgrad). Every copy then runs
forward through all layers and back, a layer at a time: a backward program runs its layer again from the hidden vectors
before it, so that no more than these are kept of a layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from kvjax.cache.protocol import BoundLayer
from kvjax.core.types import Array
from kvjax.engine.forward import Target, apply_layer, embed_at, layer_angles, outer_params
from kvjax.engine.layer_prompt import LayerCall, LayerPrompt
from kvjax.engine.modes import PromptReplay
from kvjax.engine.positions import token_positions
from kvjax.errors import KvjaxError
from kvjax.models.decoder import Angles

ReplayPrompts = tuple[Sequence[int], Sequence[int]]
"""Ids that come before the first and before every later chunk that the model is made to repeat (KVzip)."""


PROMPTS_OF_ALL_LAYERS = (
    'prompt_memory="host" reads prompts layer by layer, and this method differentiates a pass through all layers, '
    'whose prompts have to stay; leave prompt_memory at "device", or use kvzip, which needs no gradient'
)
"""Why a method with gradients refuses prompts on the host."""


@dataclasses.dataclass
class RunningCopy:
    """A copy of a chunk of the prompts, on its way through the layers.

    Attributes:
      mode: where the copied chunk and the copy stand.
      hidden: the input of the next layer [B W D].
      angles: of RoPE.
      shared: layer -> what it shared with the layers that read it, see `LayerInputs.source`.
    """

    mode: PromptReplay
    hidden: Array
    angles: Angles
    shared: dict[int, Any] = dataclasses.field(default_factory=dict)


def begin_replay(
    params: Any,
    tokens: Int32[Array, "B T"],
    lengths: Int32[Array, " B"],
    calls: Sequence[LayerCall],
    target: Target,
    *,
    replay_prompts: ReplayPrompts,
) -> list[RunningCopy]:
    """Embeds the copies that the layers read a second time, for the scores of KVzip; none where no layer asks for them.

    Arguments are those of `prefill_exactly`.
    """
    if not any(call.layer.needs.replay for call in calls):
        return []
    outer, running = outer_params(params), []
    for copy in copy_chunks(tokens, lengths, [call.layer for call in calls], replay_prompts):
        embedded = embed_at(outer, copy.tokens, copy.pos, target=target)
        running.append(RunningCopy(PromptReplay(copy.start, copy.pos, lengths), *embedded))
    return running


def replay_layer(
    params: Any,
    layer: int,
    prompt: LayerPrompt | Any,
    copies: Sequence[RunningCopy],
    exact: Mapping[int, Any],
    call: LayerCall,
    target: Target,
) -> LayerPrompt | Any:
    """Runs all copies through one layer.

    Args:
      params: of the model.
      layer: index of the layer.
      prompt: what the layer holds of the prompts.
      copies: what the layer below made of them; replaced by what this layer makes.
      exact: the same of the layers that others read.
      call: of the layer.
      target: model configuration, mesh and compiled functions.

    Returns:
      The prompt with its `replay_scores`.
    """
    assert call.kind is not None
    # No slots are made here, so that prompts of all sizes share one program.
    call, reads = dataclasses.replace(call, num_slots=0), call.kind.attention.reads_layer
    if copies and call.layer.needs.replay:
        prompt = prompt._replace(replay_scores=jnp.zeros(prompt.k.shape[:3], jnp.float32))
    for copy in copies:
        source = None if reads is None else (exact[reads], copy.shared[reads])
        copy.hidden, prompt, _, copy.shared[layer] = target.run_layer(
            params[f"layer_{layer}"],
            copy.hidden,
            layer_angles(params, copy.angles, layer, target),
            copy.mode,
            prompt,
            None,
            source,
            call=call,
            target=target,
        )
    return prompt


def replay_with_gradients(
    params: Any,
    prompts: dict[int, LayerPrompt | Any],
    copies: Sequence[RunningCopy],
    calls: Sequence[LayerCall],
    target: Target,
) -> dict[int, LayerPrompt | Any]:
    """Runs each copy through all layers and differentiates the sum of squares of its last hidden states.

    Args:
      params: of the model.
      prompts: layer -> what it holds of the prompts.
      copies: as `begin_replay` returns them.
      calls: of the layers.
      target: model configuration, mesh and compiled functions.

    Returns:
      The prompts with their `replay_scores`.
    """
    calls = [dataclasses.replace(call, num_slots=0) for call in calls]
    prompts, scores = dict(prompts), {}
    for i, call in enumerate(calls):
        if call.layer.needs.replay:
            scores[i] = jnp.zeros(prompts[i].k.shape[:3], jnp.float32)
    for copy in copies:
        inputs, sources = [], []
        for i, call in enumerate(calls):
            assert call.kind is not None
            reads = call.kind.attention.reads_layer
            inputs.append(copy.hidden)
            sources.append(None if reads is None else (prompts[reads], copy.shared[reads]))
            # Not the target's own program, which may use up the hidden vectors.
            copy.hidden, _, _, copy.shared[i] = _run_layer(
                params[f"layer_{i}"],
                copy.hidden,
                layer_angles(params, copy.angles, i, target),
                copy.mode,
                prompts[i],
                None,
                sources[i],
                call=call,
                target=target,
            )
        gradient = jnp.where((copy.mode.pos >= 0)[..., None], 2 * copy.hidden, 0)  # of |h|^2 by h, of real tokens
        shared_gradients: dict[int, Any] = {}
        for i, call in reversed(list(enumerate(calls))):
            assert call.kind is not None
            prompt = prompts[i]._replace(replay_scores=scores[i]) if i in scores else prompts[i]
            gradient, source_gradient, prompt = _differentiate_layer(
                params[f"layer_{i}"],
                inputs.pop(),
                layer_angles(params, copy.angles, i, target),
                copy.mode,
                prompt,
                sources[i],
                (gradient, shared_gradients.get(i)),
                call=call,
                target=target,
            )
            if i in scores:
                scores[i] = prompt.replay_scores
            reads = call.kind.attention.reads_layer
            if reads is not None:  # several layers may read one
                before = shared_gradients.get(reads)
                shared_gradients[reads] = (
                    source_gradient if before is None else jax.tree.map(jnp.add, before, source_gradient)
                )
    return {i: x._replace(replay_scores=scores[i]) if i in scores else x for i, x in prompts.items()}


_run_layer = jax.jit(apply_layer, static_argnames=("call", "target"))


@functools.partial(jax.jit, static_argnames=("call", "target"))
def _differentiate_layer(
    params: Any,
    hidden: Array,
    angles: Angles,
    mode: PromptReplay,
    prompt: LayerPrompt | Any,
    source: Any,
    gradients: tuple[Array, Any],
    call: LayerCall,
    target: Target,
) -> tuple[Array, Any, LayerPrompt | Any]:
    """Runs one layer of a copy backward, and updates the scores of the layer's prompt.

    Args:
      params, hidden, angles, mode, prompt, source, call, target: as in `apply_layer`.
      gradients: with respect to what the layer makes: hidden vectors, and what the layers that read it are given.

    Returns:
      The gradients with respect to `hidden` and to what this layer reads of a copy in another layer, and the prompt.
    """
    exact, shared = (None, None) if source is None else source

    def run(hidden: Array, shared: Any, added: Array) -> tuple[Array, Any]:
        source = None if exact is None else (exact, shared)
        # Without scores nothing but hidden vectors is made of the copy.
        state = prompt._replace(replay_scores=None) if isinstance(prompt, LayerPrompt) else prompt
        hidden, _, _, shares = apply_layer(
            params, hidden, angles, mode, state, None, source, added, call=call, target=target
        )
        return hidden, shares

    _, pull_back = jax.vjp(run, hidden, shared, jnp.zeros_like(hidden))
    below, shared_gradient, output_gradient = pull_back(gradients)
    norms = jnp.linalg.norm(output_gradient.astype(jnp.float32), axis=-1)
    # Scores take queries and keys of the same run, which XLA finds to be those above.
    mode = dataclasses.replace(mode, gradient_norms=norms)
    _, prompt, _, _ = apply_layer(params, hidden, angles, mode, prompt, None, source, call=call, target=target)
    return below, shared_gradient, prompt


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
