"""The decoder over a prompt: whole, in pieces, or once more; and what each layer's method sees of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from kvjax.cache.contract import Layer, last_positions
from kvjax.cache.read.reader import by_query_blocks
from kvjax.core.attention import attend_dense, causal, merge
from kvjax.core.mesh import constrain
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block
from kvjax.models.decoder import Decoder, pick
from kvjax.run import devices
from kvjax.run.forward import Plan, Setting, apply, heads, positions


class Prompt(NamedTuple):
    """What one layer has of a prompt so far: exact keys and values, and the queries that its method wants to see."""

    k: Array  # [B K S H]
    v: Array  # [B K S H]
    q: Array  # [B K G Q H]
    hidden: Array | None = None  # [B 1 S D], where the method asks for it
    output: Array | None = None  # [1 K G H D], likewise
    probed: Array | None = None  # f32[B K S], likewise
    neighbour: tuple[Array, Array] | None = None  # keys and values [B K S H] of the layer above or below, likewise


class Past(NamedTuple):
    """A prompt on its way: per layer a `Prompt` or a state, and the hidden state of each row's last token so far."""

    layers: tuple[Any, ...]
    last: Array  # [B D]


def start_prompt(batch: int, width: int, dtype: Any, setting: Setting, plan: Plan, slots: tuple[int, ...]) -> Past:
    """A prompt before its first piece, with room for `width` tokens per row."""
    c = setting.config

    def held(*axes: int) -> Array:
        return constrain(jnp.zeros((batch, c.kv_heads, *axes, c.head_dim), dtype), "B K", setting.mesh)

    def layer(i: int) -> Any:
        needs = plan[i].needs
        if needs.chunk:
            nothing = Block(held(0), held(0), jnp.zeros((batch, 1, 0), jnp.int32))
            return devices.prefill(plan[i], nothing, None, slots[i], setting.mesh)
        queries = held(c.groups, width if needs.queries is None else needs.queries)
        hidden = jnp.zeros((batch, 1, width, c.width), dtype) if needs.hidden else None
        return Prompt(held(width), held(width), queries, hidden)

    return Past(tuple(map(layer, range(c.layers))), jnp.zeros((batch, c.width), dtype))


def prompt_piece(
    params: Any, tokens: Array, start: Array, lengths: Array, past: Past, setting: Setting, plan: Plan
) -> Past:
    """Adds the tokens i32[B C] of a prompt, at positions start..start+C-1 of all rows, to what came before."""
    pos = start + positions(tokens)
    real = jnp.where(pos < lengths[:, None], pos, -1)

    def attend(i: int, q: Array, k: Array, v: Array, x: Array):
        q, k, v = heads(q, k, v, setting.mesh)
        layer, before = plan[i], past.layers[i]
        if layer.needs.chunk:
            return devices.extend(layer, before, q, Block(k, v, real[:, None]), k.shape[2], None, setting.mesh)[:2]
        at = (0, 0, start, 0)
        k, v = (lax.dynamic_update_slice(old, new, at) for old, new in ((before.k, k), (before.v, v)))
        out = causal(q, k, v, start, setting.config.window(i), pattern=layer.needs.pattern)
        hidden = before.hidden
        if hidden is not None:
            hidden = lax.dynamic_update_slice(hidden, x[:, None], at)
        return out, Prompt(k, v, shown(layer, q, start, lengths, before.q), hidden)

    hidden, layers = apply(params, setting, tokens, pos, attend, Decoder.__call__)
    return Past(layers, _if_inside(hidden, lengths - 1 - start, past.last))


def whole_prompt(
    params: Any,
    tokens: Array,
    lengths: Array,
    setting: Setting,
    plan: Plan,
    finish: Callable[[int, Prompt], Any],
) -> tuple[Array, tuple]:
    """A prompt in one piece: tokens i32[B T] -> (hidden states of the last tokens [B D], finish(i, prompt) by layer).

    Exact keys and values of a layer exist only until `finish` has made something of them.
    """
    pos = positions(tokens, lengths)
    wanted = [layer.needs.queries for layer in plan]
    everything = None in wanted
    # Of the last layer only these positions ask: no other hidden state is needed.
    asking = 0 if everything else max(1, *wanted)
    ask = pos if everything else last_positions(lengths, asking)

    def attend(i: int, q: Array, k: Array, v: Array, x: Array):
        q, k, v = heads(q, k, v, setting.mesh)
        layer, window, few = plan[i], setting.config.window(i), i + 1 == len(plan) and not everything
        if few:
            out = merge([attend_dense(q, Block(k, v, pos[:, None]), ask, window, layer.needs.pattern)])
        else:
            out = causal(q, k, v, window=window, pattern=layer.needs.pattern)
        queries = shown(layer, q, lengths - asking if few else 0, lengths)
        hidden = x[:, None] if layer.needs.hidden else None
        return out, finish(i, with_output(params, layer, i, Prompt(k, v, queries, hidden)))

    last = None if everything else jnp.maximum(ask, 0)
    hidden, layers = apply(params, setting, tokens, positions(tokens), attend, Decoder.__call__, last=last)
    hidden = pick(hidden, lengths[:, None] - 1) if everything else hidden[:, -1:]
    return hidden[:, 0], layers


def repeat(
    params: Any,
    tokens: Array,
    count: Array,
    start: Array,
    lengths: Array,
    prompts: tuple[Prompt, ...],
    setting: Setting,
    plan: Plan,
) -> tuple[Prompt, ...]:
    """The prompts, and in `probed` what their methods saw while the model read tokens i32[B T] behind them.

    The first count i32[B] of a row's tokens are real; they repeat the piece of its prompt that begins at start.
    """
    pos = positions(tokens, count)
    pos = jnp.where(pos >= 0, lengths[:, None] + pos, -1)

    def attend(i: int, q: Array, k: Array, v: Array, x: Array):
        q, k, v = heads(q, k, v, setting.mesh)
        layer, prompt, window = plan[i], prompts[i], setting.config.window(i)
        block, _ = seen_by(layer, prompt, lengths)
        fresh = Block(k, v, pos[:, None])

        def over_both(q: Array, q_pos: Array) -> Array:
            return merge([attend_dense(q, past, q_pos, window) for past in (block, fresh)])

        if layer.needs.probe is not None:
            hidden = x[:, None] if layer.needs.hidden else None
            seen = Obs(q, pos, None, prompt.output, hidden)
            probed = devices.look(layer, block, start, seen, fresh, prompt.probed, setting.mesh)
            prompt = prompt._replace(probed=probed)
        return by_query_blocks(over_both, q, pos, 128), prompt

    return apply(params, setting, tokens, jnp.maximum(pos, 0), attend, Decoder.__call__)[1]


def with_output(params: Any, layer: Layer, i: int, prompt: Any) -> Any:
    """A layer's prompt, with the output projection of layer i where its method asks for that."""
    if not layer.needs.output:
        return prompt
    return prompt._replace(output=params[f"layer_{i}"]["attention"]["o"]["kernel"][None])


def shown(layer: Layer, q: Array, first: Array | int, lengths: Array, before: Array | None = None) -> Array:
    """Of queries [B K G C H] from position `first` (one, or i32[B]) on, those that the layer wants: [B K G Q H].

    before: the same of earlier pieces, where those stay that are not in this one.
    """
    wanted, B, C = layer.needs.queries, q.shape[0], q.shape[3]
    if wanted is None:
        return q if before is None else lax.dynamic_update_slice(before, q, (0, 0, 0, first, 0))
    at = last_positions(lengths, wanted) - jnp.broadcast_to(jnp.asarray(first), (B,))[:, None]
    new = jnp.take_along_axis(q, jnp.clip(at, 0, C - 1)[:, None, None, :, None], 3)
    if before is None:
        return new
    return jnp.where(((at >= 0) & (at < C))[:, None, None, :, None], new, before)


def _if_inside(hidden: Array, at: Array, otherwise: Array) -> Array:
    """hidden [B C D] at index at i32[B] where that is one of the C, otherwise [B D]."""
    inside = (at >= 0) & (at < hidden.shape[1])
    row = jnp.take_along_axis(hidden, jnp.clip(at, 0, hidden.shape[1] - 1)[:, None, None], 1)[:, 0]
    return jnp.where(inside[:, None], row, otherwise)


def seen_by(layer: Layer, prompt: Prompt, lengths: Array, keep: Array | None = None) -> tuple[Block, Obs | None]:
    """A layer's prompt as its method takes it: the block, and the queries that it asked for."""
    pos = positions(prompt.k[:, 0, :, 0], lengths)
    block, wanted = Block(prompt.k, prompt.v, pos[:, None]), layer.needs.queries
    if not layer.needs.observes:
        return block, None
    q_pos = pos if wanted is None else last_positions(lengths, wanted)
    neighbour = None if prompt.neighbour is None else Block(*prompt.neighbour, pos[:, None])
    return block, Obs(prompt.q, q_pos, keep, prompt.output, prompt.hidden, prompt.probed, neighbour)


def encode(
    layer: Layer,
    prompt: Prompt,
    lengths: Array,
    slots: int,
    capacity: int,
    mesh: Mesh | None = None,
    keep: Array | None = None,
) -> Any:
    """A layer's prompt -> its state."""
    width = min(prompt.k.shape[2], capacity)  # what lies beyond is padding
    queries = prompt.q[:, :, :, :width] if layer.needs.queries is None else prompt.q
    hidden, probed = (None if x is None else x[:, :, :width] for x in (prompt.hidden, prompt.probed))
    neighbour = None if prompt.neighbour is None else tuple(x[:, :, :width] for x in prompt.neighbour)
    cut = Prompt(prompt.k[:, :, :width], prompt.v[:, :, :width], queries, hidden, prompt.output, probed, neighbour)
    block, seen = seen_by(layer, cut, lengths, keep)
    return devices.prefill(layer, block, seen, slots, mesh)
