"""Rounds of speculative decoding: a draft guesses some tokens, the verifier reads them all at once, both go on behind.

Between two rounds both caches hold the same new tokens: of a round they take all, and give back those rejected.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.protocol import Cache, RewindableLayer
from kvjax.core.types import Array, pytree
from kvjax.engine.decode import step as advance
from kvjax.engine.forward import Target
from kvjax.engine.sampling import Sampler, sample
from kvjax.generation.cache_ops.sequences import cropped
from kvjax.generation.decode_loop import begin
from kvjax.generation.speculative.acceptance import Shift, judge

Targets = tuple[Target, Target]  # of the verifier and of the draft


@pytree
class Rounds:
    """The state of the loop: `token` has been chosen and is in `out`, but in neither cache yet."""

    verifier: Cache
    draft: Cache
    token: Array  # i32[B]
    out: Array  # i32[B M], -1 where nothing was generated
    made: Array  # i32[B], columns of `out` that are filled
    ended: Array  # bool[B], the row has produced an end-of-sequence id
    accepted: Array  # i32[B]
    drafted: Array  # i32[B]
    count: Array  # i32[], rounds so far
    stuck: Array  # bool[2], whether the verifier's cache, the draft's, could not give back rejected tokens
    keys: Array  # one per row
    eos: Array  # i32[E]

    @property
    def open(self) -> Array:
        """bool[B]: rows that go on."""
        return ~self.ended & (self.made < self.out.shape[1])


@functools.partial(jax.jit, static_argnames="length")
def start(logits: Array, key: Array, eos: Array, sampler: Sampler, length: int) -> Rounds:
    """Draws the first token from the logits f32[B V] of the verifier's prompt; both caches are still to be put in.

    length: M, the most tokens to generate.
    """
    first = begin(logits, key, eos, sampler, num_tokens=length)
    token = first.tokens[:, 0]
    nothing: Any = None  # a cache that came in and went out again would be copied
    none = jnp.zeros_like(token)
    return Rounds(
        verifier=nothing,
        draft=nothing,
        token=token,
        out=first.out,
        made=jnp.ones_like(token),
        ended=first.done,
        accepted=none,
        drafted=none,
        count=jnp.int32(0),
        stuck=jnp.zeros(2, bool),
        keys=first.keys,
        eos=eos,
    )


def one_round(
    params: Any, draft_params: Any, rounds: Rounds, sampler: Sampler, how: Shift, ahead: int, targets: Targets
) -> Rounds:
    """Drafts `ahead` tokens of every open row, judges them, and adds those accepted and one more."""
    drafted, logits, draft = _propose(draft_params, rounds, sampler, ahead, targets[1])
    tokens = jnp.concatenate([rounds.token[:, None], drafted], 1)
    lengths = jnp.where(rounds.open, ahead + 1, 0)
    verified, verifier = advance(params, tokens, rounds.verifier, ahead + 1, targets[0], lengths)
    with jax.named_scope("accept"):
        columns = rounds.made[:, None] + jnp.arange(ahead, dtype=jnp.int32)[None]
        uniform = jax.vmap(jax.vmap(_uniform, (None, 0)))(rounds.keys, columns)
        accepted, rest = judge(sampler, how, verified, logits, drafted, uniform)
        last = jax.vmap(_instead)(rounds.keys, rounds.made + accepted, accepted == ahead, jnp.log(rest))
    rejected = jnp.where(rounds.open, ahead - accepted, 0)
    verifier, first = _take_back(verifier, rejected, targets[0])
    draft, second = _take_back(draft, rejected, targets[1])
    stuck = jnp.stack([first, second])
    return _emit(dataclasses.replace(rounds, verifier=verifier, draft=draft, stuck=stuck), drafted, accepted, last)


def _propose(params: Any, rounds: Rounds, sampler: Sampler, ahead: int, target: Target) -> tuple[Array, Array, Cache]:
    """(tokens i32[B A], the logits that they were drawn from f32[B A V], the draft's cache with all of them)."""
    lengths = rounds.open.astype(jnp.int32)

    def step(carry: tuple[Array, Cache], i: Array) -> tuple[tuple[Array, Cache], tuple[Array, Array]]:
        token, cache = carry
        logits, cache = advance(params, token[:, None], cache, 1, target, lengths)
        # Drawn with the randomness of its column, as `generate` draws it: from equal logits comes the same token.
        token = sample(sampler, logits[:, 0], jax.vmap(jax.random.fold_in)(rounds.keys, rounds.made + i))
        return (token, cache), (token, logits[:, 0])

    # The last step is there for the cache alone: it feeds the last of the drafted tokens.
    steps = jnp.arange(ahead + 1, dtype=jnp.int32)
    (_, cache), (tokens, logits) = lax.scan(step, (rounds.token, rounds.draft), steps)
    return tokens[:ahead].T, logits[:ahead].swapaxes(0, 1), cache


def _uniform(key: Array, column: Array) -> Array:
    """The number that decides on the token drafted for a column."""
    return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, column), 1))


def _instead(key: Array, column: Array, all_accepted: Array, logp: Array) -> Array:
    """The token of a column for which none was accepted; where none was drafted either, its own randomness is free."""
    free = jax.random.fold_in(key, column)
    key = jnp.where(all_accepted, free, jax.random.fold_in(free, 2))
    return jax.random.categorical(key, logp).astype(jnp.int32)


def _take_back(cache: Cache, count: Array, target: Target) -> tuple[Cache, Array]:
    """(the cache without the last count i32[B] tokens of each row, whether that was impossible)."""
    bound = [
        count > layer.max_rollback(state)
        for layer, state in zip(cache.plan, cache.layers, strict=True)
        if isinstance(layer, RewindableLayer)  # as all are, which was asked before the first round
    ]
    layers = cropped(cache.layers, count, cache.plan, target.config.kv_heads, target.mesh)
    return dataclasses.replace(cache, layers=layers, length=cache.length - count), jnp.stack(bound).any()


def _emit(rounds: Rounds, drafted: Array, accepted: Array, last: Array) -> Rounds:
    """Adds the accepted ones of tokens i32[B A] and the last i32[B] to each open row, up to its end."""
    B, ahead = drafted.shape
    M, going = rounds.out.shape[1], rounds.open
    place = jnp.arange(ahead + 1, dtype=jnp.int32)[None]
    new = jnp.where(place < accepted[:, None], jnp.pad(drafted, [(0, 0), (0, 1)]), last[:, None])
    ends = (new[..., None] == rounds.eos[None, None]).any(-1)
    behind_end = jnp.cumsum(ends, 1, dtype=jnp.int32) > ends.astype(jnp.int32)
    column = rounds.made[:, None] + place
    shown = going[:, None] & (place <= accepted[:, None]) & (column < M) & ~behind_end
    return dataclasses.replace(
        rounds,
        token=jnp.where(going, last, rounds.token),
        out=rounds.out.at[jnp.arange(B)[:, None], jnp.where(shown, column, M)].set(new, mode="drop"),
        made=rounds.made + shown.sum(1, dtype=jnp.int32),
        ended=rounds.ended | (ends & shown).any(1),
        accepted=rounds.accepted + jnp.where(going, accepted, 0),
        drafted=rounds.drafted + jnp.where(going, ahead, 0),
        count=rounds.count + 1,
    )


def all_rounds(
    params: Any, draft_params: Any, rounds: Rounds, sampler: Sampler, how: Shift, ahead: int, targets: Targets
) -> Rounds:
    """Rounds until no row is open, or a cache cannot go back."""

    def more(rounds: Rounds) -> Array:
        return rounds.open.any() & ~rounds.stuck.any()

    def body(rounds: Rounds) -> Rounds:
        return one_round(params, draft_params, rounds, sampler, how, ahead, targets)

    return lax.while_loop(more, body, rounds)
