"""Prompts whose keys and values are mostly known from elsewhere: only some of their tokens are run through the model.

Up to one layer all tokens are run, and the layers above it run only the chosen ones. Their keys and values replace the
known ones, and they attend by position to all earlier tokens, computed or known.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.core.rope import Rope, rotate
from kvjax.core.types import Array, KVBlock, pytree
from kvjax.engine.forward import Target, embed, layer_calls, outer_params, run_layers
from kvjax.engine.layer_prompt import LayerCall, LayerInputs, LayerPrompt
from kvjax.engine.modes import ForwardMode, attend_all
from kvjax.engine.positions import token_positions
from kvjax.engine.prefill import take_last
from kvjax.models.decoder import Angles, take_tokens
from kvjax.reuse.full_kv import AllQueries


class KnownTokens(NamedTuple):
    """The source of the key and value of each token of a text, i32[B T]."""

    row: Array  # index of the known prompt
    slot: Array  # in that prompt, also the position at which the key was rotated; -1 for a new token


class RecomputeChoice(NamedTuple):
    """The known tokens that are run again; new ones always are."""

    count: Array  # i32[B], tokens of each text
    importance: Array | None  # f32[B T], the highest are chosen; None: the tokens whose values deviate most


@pytree
class PartialPrefill(ForwardMode):
    """Runs only the chosen tokens of a prompt whose other keys and values are known from elsewhere (CacheBlend).

    A layer whose state is the known prompts is fed the chosen tokens alone. A layer without a state is fed all tokens;
    the last one of them (`call.selects_queries`) outputs only the chosen ones.
    """

    pos: Array  # i32[B T], of all tokens, -1 for padding
    chosen: Array  # i32[B n], indices of the tokens that are run, -1 unused
    source: KnownTokens
    rotation: Angles  # from the known keys' old positions to their new ones, each [B 1 T pairs], of all `ropes`
    ropes: tuple[Rope, ...] = dataclasses.field(metadata={"static": True})

    def query_indices(self, call: LayerCall) -> Array | None:
        return jnp.maximum(self.chosen, 0) if call.selects_queries else None

    def attend(
        self, call: LayerCall, state: LayerPrompt | None, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Array, LayerPrompt, Any]:
        q, k, v = inputs[:3]
        if state is not None:
            known_k, known_v = take_known(state, self.source)
            assert call.kind is not None
            if (rope := call.kind.attention.rope) is not None:
                known_k = rotate(known_k, *self.rotation[self.ropes.index(rope)])
            k = _put_tokens(known_k, k, self.chosen)
            v = _put_tokens(known_v, v, self.chosen)
        query_pos = self.pos
        if state is not None or call.selects_queries:
            query_pos = jnp.where(self.chosen >= 0, take_tokens(self.pos, jnp.maximum(self.chosen, 0)), -1)
        out = attend_all(q, query_pos, KVBlock(k, v, self.pos[:, None]), call.rule, outside=inputs.outside)
        return out, LayerPrompt(k, v, q[:, :, :, :0]), cross_layer


@pytree
class ReadValues(ForwardMode):
    """Computes the values of one layer, and skips its attention and MLP."""

    pos: Array  # i32[B T]

    def query_indices(self, call: LayerCall) -> Array:
        return jnp.zeros_like(self.pos[:, :1])  # one query, as no output is read

    def attend(
        self, call: LayerCall, state: None, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Array, Array, Any]:
        return jnp.zeros((*inputs.q.shape[:-1], inputs.v.shape[-1]), inputs.q.dtype), inputs.v, cross_layer


def partial_prefill(
    params: Any,
    tokens: Array,
    lengths: Array,
    prompts: Sequence[LayerPrompt],
    source: KnownTokens,
    choice: RecomputeChoice,
    *,
    target: Target,
    layer: int,
    max_run: int,
) -> tuple[Array, tuple[LayerPrompt, ...], Array]:
    """Runs all tokens up to a layer, which chooses the tokens that the layers above it run.

    Args:
      params: the decoder's parameters.
      tokens: i32[B T].
      lengths: i32[B].
      prompts: each layer's known keys and values.
      source: where in them those of each token are.
      choice: the known tokens that are run again.
      target: model configuration and compiled functions.
      layer: index of the layer that chooses.
      max_run: static, the most tokens of a sequence that are run, new ones included.

    Returns:
      Logits of the last tokens f32[B V], each layer's exact prompt, and the tokens that were run i32[B n], -1 unused.
    """
    outer = outer_params(params)
    hidden, angles, pos = embed(outer, tokens, None, lengths, target=target)
    calls = list(layer_calls((AllQueries(),) * target.config.layers, target.config))
    # Layers above the one that chooses are fed the chosen tokens alone, so it outputs only these.
    calls[layer] = dataclasses.replace(calls[layer], selects_queries=True)
    rotation, ropes = _rotation_angles(tokens, source.slot, target=target), target.config.ropes

    def run(first: int, stop: int, mode: ForwardMode, states: Sequence[Any]) -> tuple[Array, tuple[Any, ...]]:
        part = calls[first:stop], states[first:stop]
        return run_layers(params, hidden, angles, mode, *part, target=target, first_layer=first)

    no_states = (None,) * len(calls)
    hidden, below = run(0, layer, PartialPrefill(pos, pos, source, rotation, ropes), no_states)
    # The choice needs this layer's values, and its outputs depend on the choice: its projections are run twice.
    _, (values,) = run(layer, layer + 1, ReadValues(pos), no_states)
    at = _choose_tokens(values, prompts[layer], source, choice, pos, max_run=max_run)
    mode = PartialPrefill(pos, at, source, rotation, ropes)
    hidden, here = run(layer, layer + 1, mode, no_states)
    angles = jax.tree.map(lambda x: take_tokens(x, jnp.maximum(at, 0)), angles)
    hidden, above = run(layer + 1, len(calls), mode, prompts)
    # A text's last token is new, and so the last of the tokens that were run.
    logits = target.unembed(outer, take_last(hidden, (at >= 0).sum(-1, dtype=jnp.int32)), target=target)
    return logits, (*below, *here, *above), at


@functools.partial(jax.jit, static_argnames="target")
def _rotation_angles(tokens: Array, slot: Array, target: Target) -> Angles:
    """Angles of the rotation from each known key's position, slot i32[B T], to the token's own."""
    shift = (token_positions(tokens) - jnp.maximum(slot, 0))[:, None]
    return tuple(rope.angles(shift) for rope in target.config.ropes)


@functools.partial(jax.jit, static_argnames="max_run")
def _choose_tokens(
    values: Array, prompt: LayerPrompt, source: KnownTokens, choice: RecomputeChoice, pos: Array, max_run: int
) -> Array:
    """Chooses the tokens that are run, i32[B n], ascending, -1 unused: the new ones and `choice.count` known ones."""
    importance = choice.importance
    if importance is None:
        known_values = take_known(prompt, source)[1]
        importance = jnp.square(values.astype(jnp.float32) - known_values.astype(jnp.float32)).sum((1, 3))
    is_known, is_new = (source.slot >= 0) & (pos >= 0), (source.slot < 0) & (pos >= 0)
    order = jnp.argsort(jnp.where(is_known, -importance, jnp.inf), axis=1, stable=True)
    rank = jnp.argsort(order, axis=1)
    is_run = is_new | (is_known & (rank < choice.count[:, None]))
    T = pos.shape[1]
    at = jnp.sort(jnp.where(is_run, jnp.arange(T, dtype=jnp.int32)[None], T), axis=1)[:, :max_run]
    return jnp.where(at < T, at, -1)


def take_known(prompt: LayerPrompt, source: KnownTokens) -> tuple[Array, Array]:
    """Takes the known keys, rotated to their old positions, and values [B K T H] of tokens; undefined for new ones."""
    slot = jnp.maximum(source.slot, 0)
    k, v = (jnp.moveaxis(x[source.row, :, slot], 2, 1) for x in (prompt.k, prompt.v))
    return k, v


def _put_tokens(x: Array, new: Array, at: Array) -> Array:
    """Replaces tokens of x [B K T H] by new [B K n H] at indices i32[B n], -1 for none."""
    B, K, T, _ = x.shape
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.where(at >= 0, at, T)[:, None])
    return x.at[index].set(new, mode="drop")
