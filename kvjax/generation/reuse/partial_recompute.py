"""A prompt whose keys and values are mostly known from elsewhere: only some of its tokens are run through the model.

Up to one layer all tokens are run. From there on only those that were chosen go on: their keys and values replace the
known ones, and they attend to all tokens that are not behind them, by position, wherever the others' keys come from.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.core.rope import rotate
from kvjax.core.types import Array, KVBlock, pytree
from kvjax.engine.forward import PLAIN, Compiled, Target, embed, layer_calls, outer_params, run_layers
from kvjax.engine.layer_prompt import LayerPrompt
from kvjax.engine.modes import ForwardMode, LayerCall, LayerInputs, attend_all
from kvjax.engine.positions import token_positions
from kvjax.engine.prefill import take_last
from kvjax.generation.reuse.full_kv import AllQueries
from kvjax.models.decoder import Angles, take_tokens


class Source(NamedTuple):
    """The place from which each token's key and value come, i32[B T]."""

    row: Array  # of the known prompts
    slot: Array  # in that row, also the position at which the key was rotated; -1 for a token that is new


class Choice(NamedTuple):
    """Which tokens are run through all layers, apart from the new ones."""

    count: Array  # i32[B], how many of the known ones
    worth: Array | None  # f32[B T], those of the greatest worth; None: of the greatest deviation of their values


@pytree
class PartialPrefill(ForwardMode):
    """Runs only the chosen tokens of a prompt whose other keys and values are known from elsewhere (CacheBlend).

    A layer with a state, the prompts that these are known from, is fed the chosen tokens alone. One without is fed all
    tokens; if it is the last such layer (`call.selects_queries`), it passes on only the chosen ones.
    """

    pos: Array  # i32[B T], of all tokens, -1 for padding
    chosen: Array  # i32[B n], indices of the tokens that are run, -1 unused
    source: Source
    turn: Angles  # of the rotation from where the known keys were to where they are, [B 1 T H/2]

    def query_indices(self, call: LayerCall) -> Array | None:
        return jnp.maximum(self.chosen, 0) if call.selects_queries else None

    def attend(
        self, call: LayerCall, state: LayerPrompt | None, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Array, LayerPrompt, Any]:
        q, k, v = inputs[:3]
        if state is not None:
            known_k, known_v = take_known(state, self.source)
            k = _put_tokens(rotate(known_k, *self.turn), k, self.chosen)
            v = _put_tokens(known_v, v, self.chosen)
        query_pos = self.pos
        if state is not None or call.selects_queries:
            query_pos = jnp.where(self.chosen >= 0, take_tokens(self.pos, jnp.maximum(self.chosen, 0)), -1)
        out = attend_all(q, query_pos, KVBlock(k, v, self.pos[:, None]), call.window)
        return out, LayerPrompt(k, v, q[:, :, :, :0]), cross_layer


@pytree
class ReadValues(ForwardMode):
    """Computes the values of one layer, and nothing of what follows them."""

    pos: Array  # i32[B T]

    def query_indices(self, call: LayerCall) -> Array:
        return jnp.zeros_like(self.pos[:, :1])

    def attend(
        self, call: LayerCall, state: None, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Array, Array, Any]:
        return jnp.zeros_like(inputs.q), inputs.v, cross_layer


def partial_prefill(
    params: Any,
    tokens: Array,
    lengths: Array,
    prompts: Sequence[LayerPrompt],
    source: Source,
    choice: Choice,
    target: Target,
    layer: int,
    most: int,
    compiled: Compiled = PLAIN,
) -> tuple[Array, tuple[LayerPrompt, ...], Array]:
    """Runs all tokens up to a layer, and in it chooses those that the layers above run.

    Args:
      params: the decoder's parameters.
      tokens: i32[B T].
      lengths: i32[B].
      prompts: what each layer's keys and values are known from.
      source: where in it each token's are.
      choice: which of the known tokens are run.
      target: model configuration.
      layer: the first one from which on only chosen tokens are run.
      most: static, how many of a sequence at most.
      compiled: the functions that run a layer and make logits.

    Returns:
      Logits of the last tokens f32[B V], each layer's exact prompt, and the tokens that were run i32[B n], -1 unused.
    """
    outer, n = outer_params(params), layer
    hidden, angles, pos = embed(outer, tokens, None, lengths, target=target)
    calls = list(layer_calls((AllQueries(),) * target.config.layers, target.config))
    # Layers above the one that chooses are fed the chosen tokens alone, and it passes on only these.
    calls[n] = dataclasses.replace(calls[n], selects_queries=True)
    turn = _rotation_angles(tokens, source.slot, target=target)

    def run(first: int, stop: int, mode: ForwardMode, states: Sequence[Any]) -> tuple[Array, tuple[Any, ...]]:
        part = calls[first:stop], states[first:stop]
        return run_layers(params, hidden, angles, mode, *part, target, compiled, first_layer=first)

    nothing = (None,) * len(calls)
    hidden, below = run(0, n, PartialPrefill(pos, pos, source, turn), nothing)
    _, (values,) = run(n, n + 1, ReadValues(pos), nothing)
    at = _choose_tokens(values, prompts[n], source, choice, pos, most=most)
    mode = PartialPrefill(pos, at, source, turn)
    hidden, here = run(n, n + 1, mode, nothing)
    angles = _pick_angles(angles, at)
    hidden, above = run(n + 1, len(calls), mode, prompts)
    # A prompt's last token is new, and so among those that were run.
    logits = compiled.unembed(outer, take_last(hidden, (at >= 0).sum(-1, dtype=jnp.int32)), target=target)
    return logits, (*below, *here, *above), at


@jax.jit
def _pick_angles(angles: Angles, at: Array) -> Angles:
    return jax.tree.map(lambda x: take_tokens(x, jnp.maximum(at, 0)), angles)


@functools.partial(jax.jit, static_argnames="target")
def _rotation_angles(tokens: Array, slot: Array, target: Target) -> Angles:
    """Angles of the rotation from each known key's position, slot i32[B T], to the token's own."""
    return target.config.rope.angles((token_positions(tokens) - jnp.maximum(slot, 0))[:, None])


@functools.partial(jax.jit, static_argnames="most")
def _choose_tokens(values: Array, prompt: LayerPrompt, source: Source, choice: Choice, pos: Array, most: int) -> Array:
    """The tokens that go on, from the values [B K T H] as they are now and as they were known: i32[B n]."""
    worth = choice.worth
    if worth is None:
        before = take_known(prompt, source)[1]
        worth = jnp.square(values.astype(jnp.float32) - before.astype(jnp.float32)).sum((1, 3))
    return choose_by_importance(worth, choice.count, source.slot, pos, most)


def take_known(prompt: LayerPrompt, source: Source) -> tuple[Array, Array]:
    """Keys, as they were rotated, and values [B K T H] of tokens in one layer; those of new tokens mean nothing."""
    slot = jnp.maximum(source.slot, 0)
    k, v = (jnp.moveaxis(x[source.row, :, slot], 2, 1) for x in (prompt.k, prompt.v))
    return k, v


def choose_by_importance(worth: Array, count: Array, slot: Array, pos: Array, most: int) -> Array:
    """Tokens to run i32[B n], ascending, -1 unused: the new ones, and count i32[B] of the known of highest worth."""
    old = (slot >= 0) & (pos >= 0)
    order = jnp.argsort(jnp.where(old, -worth, jnp.inf), axis=1, stable=True)
    rank = jnp.argsort(order, axis=1)
    run = (old & (rank < count[:, None])) | ((slot < 0) & (pos >= 0))
    T = pos.shape[1]
    found = jnp.sort(jnp.where(run, jnp.arange(T, dtype=jnp.int32)[None], T), axis=1)[:, :most]
    return jnp.where(found < T, found, -1)


def _put_tokens(x: Array, new: Array, at: Array) -> Array:
    """x [B K T H] with new [B K n H] at the indices at i32[B n], -1 for none."""
    B, K, T, _ = x.shape
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.where(at >= 0, at, T)[:, None])
    return x.at[index].set(new, mode="drop")
