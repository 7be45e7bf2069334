"""The decode loop with end-of-sequence ids: one step, run eagerly, or inside a loop that is one program."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from kvjax.cache.protocol import Cache
from kvjax.core.mesh import constrain
from kvjax.core.types import Array, pytree
from kvjax.engine import decode
from kvjax.engine.forward import Target
from kvjax.engine.sampling import Sampler, TokenCounts, count_tokens, sample, sequence_keys


@pytree
class TokenLogProbs:
    """Natural-log probabilities of the tokens of `DecodeState.out`, in the model's distribution before the sampler."""

    drawn: Array  # f32[B M]
    top_ids: Array  # i32[B M k], the k likeliest tokens, likeliest first
    top: Array  # f32[B M k]


@pytree
class DecodeState:
    """The state of the decode loop: the token `tokens[:, 0]` has been drawn and is in `out`, not yet in the cache."""

    cache: Cache | None
    tokens: Array  # i32[B 1|2], fed in the next step: the last token, and a draft of the next for a method with one
    out: Array  # i32[B M], -1 where nothing was generated
    done: Array  # bool[B], the sequence has produced an end-of-sequence id, or logits that are not finite
    is_finite: Array  # bool[B], all logits that the sequence's tokens were drawn from are finite
    i: Array  # i32[], columns of `out` that are filled
    keys: Array  # random keys, one per sequence
    eos: Array  # i32[E]
    counts: TokenCounts | None = None  # for a sampler with penalties
    logprobs: TokenLogProbs | None = None  # where they were asked for


@functools.partial(jax.jit, static_argnames=("num_tokens", "has_drafts", "num_top", "mesh"))
def init_state(
    logits: Array,
    key: Array,
    eos: Array,
    sampler: Sampler,
    *,
    num_tokens: int,
    first_sequence: Array | int = 0,
    has_drafts: bool = False,
    in_prompt: Array | None = None,
    num_top: int | None = None,
    mesh: Mesh | None = None,
) -> DecodeState:
    """Draws the first of at most `num_tokens` tokens from the prompts' logits f32[B V]; the cache is still missing.

    Sequences draw by their number from `first_sequence` on. With `has_drafts` each step carries a draft, see
    `draft_first`.

    Args:
      in_prompt: bool[B V], the tokens of each prompt, for a sampler with a repetition penalty.
      num_top: how many of the likeliest tokens get log-probabilities with those drawn; None for no log-probabilities.
      mesh: of the model.
    """
    B, V = logits.shape
    out = jnp.full((B, num_tokens), -1, jnp.int32)
    keys = sequence_keys(key, B, first_sequence)
    counts = None if sampler.penalties is None else TokenCounts(in_prompt, jnp.zeros((B, V), jnp.int32))
    logprobs = None
    if num_top is not None:
        top = jnp.zeros((B, num_tokens, num_top))
        logprobs = TokenLogProbs(jnp.zeros((B, num_tokens)), top.astype(jnp.int32), top)
    state = DecodeState(None, out[:, :1], out, jnp.zeros(B, bool), jnp.ones(B, bool), jnp.int32(0), keys, eos)
    state = dataclasses.replace(state, counts=counts, logprobs=logprobs)
    state = _draw_next(state, logits[:, None], sampler, mesh)
    return dataclasses.replace(state, tokens=jnp.repeat(state.tokens, 1 + has_drafts, 1))


def step(params: Any, state: DecodeState, sampler: Sampler, target: Target) -> DecodeState:
    """Decodes one token of every sequence; its draft, if any, leaves no trace in the cache."""
    assert state.cache is not None
    logits, cache = decode.step(params, state.tokens, state.cache, 1, target)
    # The jitted draw is given no cache: one that it returned unchanged would be copied.
    drawn = draw_next(dataclasses.replace(state, cache=None), logits, sampler, target.mesh)
    return dataclasses.replace(drawn, cache=cache)


def draft_first(params: Any, state: DecodeState, sampler: Sampler, target: Target) -> DecodeState:
    """Drafts the token after the first one before any step, and commits nothing (SpeCache, Algorithm 2)."""
    assert state.cache is not None
    logits, cache = decode.step(params, state.tokens[:, :1], state.cache, 0, target)
    tokens = _draw_first_draft(dataclasses.replace(state, cache=None), logits, sampler)
    return dataclasses.replace(state, tokens=tokens, cache=cache)


def decode_until(params: Any, state: DecodeState, limit: Array, sampler: Sampler, target: Target) -> DecodeState:
    """Steps until `limit` columns are filled or all sequences are done."""
    return lax.while_loop(
        lambda state: (state.i < limit) & ~state.done.all(), lambda state: step(params, state, sampler, target), state
    )


def decode_fixed(params: Any, state: DecodeState, sampler: Sampler, target: Target) -> DecodeState:
    """Steps until all M columns are filled, whatever the tokens."""
    num_steps = state.out.shape[1] - 1
    return lax.scan(lambda state, _: (step(params, state, sampler, target), None), state, length=num_steps)[0]


def _draw_next(state: DecodeState, logits: Array, sampler: Sampler, mesh: Mesh | None) -> DecodeState:
    """Draws the next token, and the draft after it, from a step's logits f32[B 1|2 V]."""
    token = _draw(state, logits[:, 0], sampler)
    # A draw from NaN is a token like any other, so the state says it; what follows a sequence's end may be anything.
    # The flag is read where the loop returns anyhow, and a sequence that has it is not decoded on.
    is_finite = state.is_finite & (state.done | jnp.isfinite(logits[:, 0]).all(-1))
    column, logprobs = jnp.where(state.done | ~is_finite, -1, token), state.logprobs
    if logprobs is not None:
        new = log_probs_of(logits[:, :1], token[:, None], logprobs.top.shape[2])
        update = functools.partial(lax.dynamic_update_slice_in_dim, start_index=state.i, axis=1)
        logprobs = jax.tree.map(update, logprobs, new)
    # Every device holds these whole, so that the host reads them after a step without a collective of its own.
    column, token, is_finite = (constrain(x, "", mesh) for x in (column, token, is_finite))
    state = dataclasses.replace(
        state,
        tokens=token[:, None],
        out=lax.dynamic_update_slice(state.out, column[:, None], (0, state.i)),
        done=state.done | ~is_finite | (token[:, None] == state.eos[None]).any(-1),
        is_finite=is_finite,
        i=state.i + 1,
        counts=None if state.counts is None else count_tokens(state.counts, token),
        logprobs=logprobs,
    )
    if logits.shape[1] == 2:
        # A draft is drawn with the randomness of its column: equal logits give the token that will be drawn there.
        draft = _draw(state, logits[:, 1], sampler)
        state = dataclasses.replace(state, tokens=jnp.stack([token, draft], 1))
    return state


def _draw(state: DecodeState, logits: Array, sampler: Sampler) -> Array:
    """Draws the tokens i32[B] of the next column of `out` from logits f32[B V]."""
    with jax.named_scope("sample"):
        keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.i)
        return sample(sampler, logits, keys, state.counts)


def log_probs_of(logits: Array, tokens: Array, num_top: int) -> TokenLogProbs:
    """The log-probabilities of tokens i32[B T] that were drawn from logits f32[B T V], and of the likeliest."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    top, top_ids = lax.top_k(logp, num_top)
    return TokenLogProbs(jnp.take_along_axis(logp, tokens[..., None], -1)[..., 0], top_ids.astype(jnp.int32), top)


draw_next = jax.jit(_draw_next, static_argnames="mesh")


@jax.jit
def _draw_first_draft(state: DecodeState, logits: Array, sampler: Sampler) -> Array:
    return jnp.stack([state.tokens[:, 0], _draw(state, logits[:, 0], sampler)], 1)
