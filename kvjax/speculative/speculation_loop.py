"""Rounds of speculative decoding: a draft proposes some tokens, and the verifier reads them all at once.

Between two rounds both caches hold the same new tokens: in a round they take all of them, and give back those rejected.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from kvjax.cache.protocol import Cache, RewindableLayer
from kvjax.cache_ops import crop_layers
from kvjax.core.types import Array, pytree
from kvjax.engine import decode
from kvjax.engine.forward import Target
from kvjax.engine.sampling import Sampler, sample
from kvjax.generation import decode_loop
from kvjax.generation.decode_loop import TokenLogProbs
from kvjax.speculative.acceptance import Shift, verify

Targets = tuple[Target, Target]  # of the verifier and of the draft


@pytree
class SpeculationState:
    """The state of the loop: `token` has been drawn and is in `out`, but in neither cache yet."""

    verifier: Cache
    draft: Cache
    token: Array  # i32[B]
    out: Array  # i32[B M], -1 where nothing was generated
    num_generated: Array  # i32[B], columns of `out` that are filled
    ended: Array  # bool[B], the sequence has produced an end-of-sequence id
    accepted: Array  # i32[B], drafted tokens that were accepted
    drafted: Array  # i32[B]
    count: Array  # i32[], rounds so far
    is_finite: Array  # bool[2 B], all logits of the verifier, and of the draft, that decided on tokens are finite
    rollback_failed: Array  # bool[2], the verifier's or the draft's cache could not give back rejected tokens
    keys: Array  # random keys, one per sequence
    eos: Array  # i32[E]
    logprobs: TokenLogProbs | None  # the verifier's, where they were asked for

    @property
    def is_active(self) -> Array:
        """bool[B]: sequences that are not finished."""
        return ~self.ended & (self.num_generated < self.out.shape[1])


@functools.partial(jax.jit, static_argnames=("length", "num_top", "mesh"))
def init_state(
    logits: Array, key: Array, eos: Array, sampler: Sampler, length: int, num_top: int | None, mesh: Mesh | None
) -> SpeculationState:
    """Draws the first of at most `length` tokens from the logits f32[B V] of the prompts; caches are still missing."""
    first = decode_loop.init_state(logits, key, eos, sampler, num_tokens=length, num_top=num_top, mesh=mesh)
    token = first.tokens[:, 0]
    no_cache: Any = None  # a jitted function copies a cache that it returns unchanged
    zeros = jnp.zeros_like(token)
    return SpeculationState(
        verifier=no_cache,
        draft=no_cache,
        token=token,
        out=first.out,
        num_generated=jnp.ones_like(token),
        ended=first.done,
        accepted=zeros,
        drafted=zeros,
        count=jnp.int32(0),
        is_finite=jnp.stack([first.is_finite] * 2),
        rollback_failed=jnp.zeros(2, bool),
        keys=first.keys,
        eos=eos,
        logprobs=first.logprobs,
    )


def run_rounds(
    params: Any,
    draft_params: Any,
    state: SpeculationState,
    sampler: Sampler,
    shift: Shift,
    *,
    num_draft_tokens: int,
    targets: Targets,
) -> SpeculationState:
    """Runs rounds until no sequence is active, or a cache could not give back rejected tokens."""

    def run_round(state: SpeculationState) -> SpeculationState:
        drafted, draft_logits, draft = _propose(draft_params, state, sampler, num_draft_tokens, targets[1])
        tokens = jnp.concatenate([state.token[:, None], drafted], 1)
        lengths = jnp.where(state.is_active, num_draft_tokens + 1, 0)
        logits, verifier = decode.step(params, tokens, state.verifier, num_draft_tokens + 1, targets[0], lengths)
        with jax.named_scope("accept"):
            columns = state.num_generated[:, None] + jnp.arange(num_draft_tokens, dtype=jnp.int32)[None]
            uniform = jax.vmap(jax.vmap(_acceptance_number, (None, 0)))(state.keys, columns)
            accepted, distribution = verify(sampler, shift, logits, draft_logits, drafted, uniform)
            column, all_accepted = state.num_generated + accepted, accepted == num_draft_tokens
            last = jax.vmap(_resample)(state.keys, column, all_accepted, jnp.log(distribution))
            # Nothing depends on the logits after the first rejected token, whose text is nobody's.
            is_finite = [_is_finite_until(x, accepted) | ~state.is_active for x in (logits, draft_logits)]
            is_finite = state.is_finite & jnp.stack(is_finite)
        rejected = jnp.where(state.is_active, num_draft_tokens - accepted, 0)
        verifier, verifier_failed = _roll_back(verifier, rejected, targets[0])
        draft, draft_failed = _roll_back(draft, rejected, targets[1])
        failed = jnp.stack([verifier_failed, draft_failed])
        state = dataclasses.replace(state, verifier=verifier, draft=draft, is_finite=is_finite, rollback_failed=failed)
        state = _append_tokens(state, drafted, accepted, last, logits)
        return dataclasses.replace(state, ended=state.ended | ~is_finite.all(0))

    return lax.while_loop(lambda state: state.is_active.any() & ~state.rollback_failed.any(), run_round, state)


def _propose(
    params: Any, state: SpeculationState, sampler: Sampler, num_draft_tokens: int, target: Target
) -> tuple[Array, Array, Cache]:
    """Drafts tokens i32[B A]; returns also their logits f32[B A V], and the draft's cache with all of them."""
    lengths = state.is_active.astype(jnp.int32)

    def run_step(carry: tuple[Array, Cache], i: Array) -> tuple[tuple[Array, Cache], tuple[Array, Array]]:
        token, cache = carry
        logits, cache = decode.step(params, token[:, None], cache, 1, target, lengths)
        # Drawn with the randomness of its column, as `generate` draws it: equal logits give the same token.
        token = sample(sampler, logits[:, 0], jax.vmap(jax.random.fold_in)(state.keys, state.num_generated + i))
        return (token, cache), (token, logits[:, 0])

    # The last step only feeds the last drafted token, so that both caches hold the same tokens.
    steps = jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)
    (_, cache), (tokens, logits) = lax.scan(run_step, (state.token, state.draft), steps)
    return tokens[:num_draft_tokens].T, logits[:num_draft_tokens].swapaxes(0, 1), cache


def _is_finite_until(logits: Array, last: Array) -> Array:
    """Whether the logits f32[B T V] of tokens 0..last i32[B] are finite, bool[B]."""
    is_later = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] > last[:, None]
    return (jnp.isfinite(logits).all(-1) | is_later).all(1)


def _acceptance_number(key: Array, column: Array) -> Array:
    """Draws the number in [0, 1) that decides on the token drafted for a column."""
    return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, column), 1))


def _resample(key: Array, column: Array, all_accepted: Array, logp: Array) -> Array:
    """Draws the token after the accepted ones from log probabilities f32[V]."""
    # The column's own randomness is unused only where no token was drafted for it.
    unused = jax.random.fold_in(key, column)
    key = jnp.where(all_accepted, unused, jax.random.fold_in(unused, 2))
    return jax.random.categorical(key, logp).astype(jnp.int32)


def _roll_back(cache: Cache, count: Array, target: Target) -> tuple[Cache, Array]:
    """Removes the last count i32[B] tokens of each sequence; returns also whether some layer could not."""
    failed = [
        count > layer.max_rollback(state)
        for layer, state in zip(cache.plan, cache.layers, strict=True)
        if isinstance(layer, RewindableLayer)  # true for all layers, which was checked before the first round
    ]
    layers = crop_layers(cache.layers, count, cache.plan, target.config, target.mesh)
    return dataclasses.replace(cache, layers=layers, length=cache.length - count), jnp.stack(failed).any()


def _append_tokens(
    state: SpeculationState, drafted: Array, accepted: Array, last: Array, logits: Array
) -> SpeculationState:
    """Appends the accepted i32[B] of tokens drafted i32[B A], and the last i32[B], to each active sequence.

    The verifier's logits f32[B A+1 V] give the log-probabilities.
    """
    B, num_draft_tokens = drafted.shape
    M, is_active = state.out.shape[1], state.is_active
    place = jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)[None]
    new = jnp.where(place < accepted[:, None], jnp.pad(drafted, [(0, 0), (0, 1)]), last[:, None])
    is_eos = (new[..., None] == state.eos[None, None]).any(-1)
    after_eos = jnp.cumsum(is_eos, 1, dtype=jnp.int32) > is_eos.astype(jnp.int32)
    column = state.num_generated[:, None] + place
    is_new = is_active[:, None] & (place <= accepted[:, None]) & (column < M) & ~after_eos
    places = jnp.arange(B)[:, None], jnp.where(is_new, column, M)
    logprobs = state.logprobs
    if logprobs is not None:
        new_logprobs = decode_loop.log_probs_of(logits, new, logprobs.top.shape[2])
        logprobs = jax.tree.map(lambda x, y: x.at[places].set(y, mode="drop"), logprobs, new_logprobs)
    return dataclasses.replace(
        state,
        token=jnp.where(is_active, last, state.token),
        out=state.out.at[places].set(new, mode="drop"),
        logprobs=logprobs,
        num_generated=state.num_generated + is_new.sum(1, dtype=jnp.int32),
        ended=state.ended | (is_eos & is_new).any(1),
        accepted=state.accepted + jnp.where(is_active, accepted, 0),
        drafted=state.drafted + jnp.where(is_active, num_draft_tokens, 0),
        count=state.count + 1,
    )
