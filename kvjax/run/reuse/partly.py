"""A prompt whose keys and values are mostly known from elsewhere: only some of its tokens are run through the model.

Up to one layer all tokens are run. From there on only those that were chosen go on: their keys and values replace the
known ones, and they attend to all tokens that are not behind them, by position, wherever the others' keys come from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from kvjax.cache.read.reader import by_query_blocks
from kvjax.core.attention import attend_dense, merge
from kvjax.core.program import Program
from kvjax.core.rope import Rope, rotate
from kvjax.core.types import Array, Block, Partial
from kvjax.models.decoder import Decoder, pick
from kvjax.run import forward
from kvjax.run.forward import Setting
from kvjax.run.reading import Prompt


class Source(NamedTuple):
    """Where the key and the value of each token come from, i32[B T]."""

    row: Array  # of the known prompts
    slot: Array  # in that row, also the position at which the key was rotated; -1 for a token that is new


class Choice(NamedTuple):
    """Which tokens are run through all layers beside the new ones."""

    count: Array  # i32[B], how many of the known ones
    worth: Array | None  # f32[B T], those of the greatest worth; None: of the greatest deviation of their values


Choose = Callable[[Array, Array], Array]
"""(a layer's values as they are now, and as they were known, [B K T H]) -> indices of tokens i32[B n], -1 unused."""


def known(prompt: Prompt, source: Source, rope: Rope) -> tuple[Array, Array]:
    """Keys, turned to where they stand now, and values [B K T H] of one layer; those of new tokens mean nothing."""
    slot = jnp.maximum(source.slot, 0)
    k, v = (jnp.moveaxis(x[source.row, :, slot], 2, 1) for x in (prompt.k, prompt.v))
    here = jnp.arange(slot.shape[1], dtype=jnp.int32)[None]
    return rotate(k, *rope.angles((here - slot)[:, None])), v


def partly(
    params: Any,
    tokens: Array,
    lengths: Array,
    prompts: tuple[Prompt, ...],
    source: Source,
    choice: Choice,
    setting: Setting,
    layer: int,
    most: int,
) -> tuple[Array, tuple[tuple[Array, Array], ...], Array]:
    """Tokens i32[B T] -> (logits of the last ones f32[B V], keys and values of all layers, which were run i32[B n]).

    layer: the first one from which on only chosen tokens are run, `most` of them in a row.
    """
    pos = forward.positions(tokens, lengths)

    def choose(now: Array, before: Array) -> Array:
        worth = choice.worth
        if worth is None:
            worth = jnp.square(now.astype(jnp.float32) - before.astype(jnp.float32)).sum((1, 3))
        return chosen(worth, choice.count, source.slot, pos, most)

    def run(decoder: Decoder, tokens: Array, pos: Array) -> tuple[Array, tuple, Array]:
        return _layers(decoder, tokens, pos, prompts, source, choose, layer)

    decoder = Decoder(setting.config, params["embedding"].dtype)
    hidden, layers, at = decoder.apply({"params": params}, tokens, pos, method=run)
    last = (at >= 0).sum(-1, dtype=jnp.int32) - 1  # a prompt's last token is new, and so among them
    return forward.unembed(params, pick(hidden, last[:, None])[:, 0], setting), layers, at


PARTLY = Program(partly, static=("setting", "layer", "most"))


def chosen(worth: Array, count: Array, slot: Array, pos: Array, most: int) -> Array:
    """Tokens to run i32[B n], ascending, -1 unused: the new ones, and count i32[B] of the known of highest worth."""
    old = (slot >= 0) & (pos >= 0)
    order = jnp.argsort(jnp.where(old, -worth, jnp.inf), axis=1, stable=True)
    rank = jnp.argsort(order, axis=1)
    run = (old & (rank < count[:, None])) | ((slot < 0) & (pos >= 0))
    T = pos.shape[1]
    found = jnp.sort(jnp.where(run, jnp.arange(T, dtype=jnp.int32)[None], T), axis=1)[:, :most]
    return jnp.where(found < T, found, -1)


def _layers(
    decoder: Decoder,
    tokens: Array,
    pos: Array,
    prompts: tuple[Prompt, ...],
    source: Source,
    choose: Choose,
    narrow: int,
) -> tuple[Array, tuple, Array]:
    """(final hidden states of the chosen tokens [B n D], keys and values of all layers, the chosen tokens)."""
    config = decoder.config
    x, angles, q_pos = decoder.embedding[tokens], config.rope.angles(jnp.maximum(pos, 0)), pos
    at, states = None, []
    for i, block in enumerate(decoder.blocks):
        old = known(prompts[i], source, config.rope)
        if i == narrow:
            first = jnp.zeros((tokens.shape[0], 1), jnp.int32)
            at = choose(block(x, angles, _values, first)[1], old[1])
            index = jnp.maximum(at, 0)
            q_pos = jnp.where(at >= 0, pick(pos, index), -1)
        attend = _attend(pos, q_pos, config.window(i), (old, at) if i > narrow else None)
        x, state = block(x, angles, attend, index if i == narrow else None)
        states.append(state)
        if i == narrow:
            angles = tuple(pick(a, index) for a in angles)
    return decoder.final_norm(x), tuple(states), at


def _values(layer: int, q: Array, k: Array, v: Array, x: Array) -> tuple[Array, Array]:
    """Only looks at a layer's values."""
    return jnp.zeros_like(q), v


def _attend(pos: Array, q_pos: Array, window: int | None, into: tuple[tuple[Array, Array], Array] | None):
    """Attention of queries at q_pos i32[B n] to all tokens, of which those at the indices `at` have been run again."""

    def attend(layer: int, q: Array, k: Array, v: Array, x: Array) -> tuple[Array, tuple[Array, Array]]:
        if into is not None:
            (old_k, old_v), at = into
            k, v = _replaced(old_k, k, at), _replaced(old_v, v, at)
        block = Block(k, v, pos[:, None])

        def over_all(q: Array, q_pos: Array) -> Partial:
            return attend_dense(q, block, q_pos, window)

        return merge([by_query_blocks(over_all, q, q_pos, 128)]), (k, v)

    return attend


def _replaced(x: Array, new: Array, at: Array) -> Array:
    """x [B K T H] with new [B K n H] at the indices at i32[B n], -1 for none."""
    B, K, T, _ = x.shape
    index = (jnp.arange(B)[:, None, None], jnp.arange(K)[None, :, None], jnp.where(at >= 0, at, T)[:, None])
    return x.at[index].set(new, mode="drop")
