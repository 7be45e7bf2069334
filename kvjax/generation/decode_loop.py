"""The decode loop with end-of-sequence ids: one step, run eagerly, or inside a loop that is one program."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.protocol import Cache
from kvjax.core.types import Array, pytree
from kvjax.engine import decode
from kvjax.engine.forward import PLAIN, Compiled, Target
from kvjax.engine.sampling import Sampler, sample, sequence_keys


@pytree
class DecodeState:
    """The state of the decode loop: the token `tokens[:, 0]` has been drawn and is in `out`, not yet in the cache."""

    cache: Cache | None
    tokens: Array  # i32[B 1|2], fed in the next step: the last token, and a draft of the next for a method with one
    out: Array  # i32[B M], -1 where nothing was generated
    done: Array  # bool[B], the sequence has produced an end-of-sequence id
    i: Array  # i32[], columns of `out` that are filled
    keys: Array  # random keys, one per sequence
    eos: Array  # i32[E]


@functools.partial(jax.jit, static_argnames=("num_tokens", "has_drafts"))
def init_state(
    logits: Array,
    key: Array,
    eos: Array,
    sampler: Sampler,
    *,
    num_tokens: int,
    first_row: Array | int = 0,
    has_drafts: bool = False,
) -> DecodeState:
    """Draws the first of at most `num_tokens` tokens from the prompts' logits f32[B V]; the cache is still missing.

    Sequences draw by their number from `first_row` on. With `has_drafts` each step carries a draft, see `draft_first`.
    """
    B = logits.shape[0]
    out = jnp.full((B, num_tokens), -1, jnp.int32)
    keys = sequence_keys(key, B, first_row)
    state = DecodeState(None, out[:, :1], out, jnp.zeros(B, bool), jnp.int32(0), keys, eos)
    state = _draw_next(state, logits[:, None], sampler)
    return dataclasses.replace(state, tokens=jnp.repeat(state.tokens, 1 + has_drafts, 1))


def step(params: Any, state: DecodeState, sampler: Sampler, target: Target, compiled: Compiled = PLAIN) -> DecodeState:
    """Decodes one token of every sequence; its draft, if any, leaves no trace in the cache."""
    assert state.cache is not None
    logits, cache = decode.step(params, state.tokens, state.cache, 1, target, compiled=compiled)
    # The jitted draw is given no cache: one that it returned unchanged would be copied.
    return dataclasses.replace(draw_next(dataclasses.replace(state, cache=None), logits, sampler), cache=cache)


def draft_first(
    params: Any, state: DecodeState, sampler: Sampler, target: Target, compiled: Compiled = PLAIN
) -> DecodeState:
    """Drafts the token after the first one before any step, and commits nothing (SpeCache, Algorithm 2)."""
    assert state.cache is not None
    logits, cache = decode.step(params, state.tokens[:, :1], state.cache, 0, target, compiled=compiled)
    tokens = _draw_first_draft(state.tokens, state.keys, state.i, logits, sampler)
    return dataclasses.replace(state, tokens=tokens, cache=cache)


def decode_until(params: Any, state: DecodeState, limit: Array, sampler: Sampler, target: Target) -> DecodeState:
    """Steps until `limit` columns are filled or all sequences are done."""
    return lax.while_loop(
        lambda state: (state.i < limit) & ~state.done.all(),
        lambda state: step(params, state, sampler, target),
        state,
    )


def decode_fixed(params: Any, state: DecodeState, sampler: Sampler, target: Target) -> DecodeState:
    """Steps until all M columns are filled, whatever the tokens."""
    num_steps = state.out.shape[1] - 1
    return lax.scan(lambda state, _: (step(params, state, sampler, target), None), state, length=num_steps)[0]


def _draw_next(state: DecodeState, logits: Array, sampler: Sampler) -> DecodeState:
    """Draws the next token, and the draft after it, from a step's logits f32[B 1|2 V]."""
    token = _draw(state.keys, state.i, logits[:, 0], sampler)
    column = jnp.where(state.done, -1, token)
    out = lax.dynamic_update_slice(state.out, column[:, None], (0, state.i))
    done = state.done | (token[:, None] == state.eos[None]).any(-1)
    tokens = token[:, None]
    if logits.shape[1] == 2:
        # A draft is drawn with the randomness of its column: equal logits give the token that will be drawn there.
        tokens = jnp.stack([token, _draw(state.keys, state.i + 1, logits[:, 1], sampler)], 1)
    return dataclasses.replace(state, tokens=tokens, out=out, done=done, i=state.i + 1)


def _draw(keys: Array, column: Array, logits: Array, sampler: Sampler) -> Array:
    """Draws the tokens i32[B] of one column of `out` from logits f32[B V]."""
    with jax.named_scope("sample"):
        return sample(sampler, logits, jax.vmap(jax.random.fold_in, (0, None))(keys, column))


draw_next = jax.jit(_draw_next)


@jax.jit
def _draw_first_draft(tokens: Array, keys: Array, column: Array, logits: Array, sampler: Sampler) -> Array:
    return jnp.stack([tokens[:, 0], _draw(keys, column, logits[:, 0], sampler)], 1)
