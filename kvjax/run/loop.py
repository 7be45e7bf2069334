"""The decode loop: one step serves loops that are one program, and steps that run layer by layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.contract import Cache
from kvjax.core import product
from kvjax.core.program import Program
from kvjax.core.types import Array, pytree
from kvjax.models.model import Model
from kvjax.run import passes
from kvjax.run.by_layer import Stepper
from kvjax.run.clock import Clock
from kvjax.run.forward import Setting
from kvjax.run.sampling import Sampler, row_keys, sample


@pytree
class Carry:
    """The decode loop's state: `token` has been sampled and is in `out`, but not in the cache yet."""

    cache: Cache
    token: Array  # i32[B]
    out: Array  # i32[B M], -1 where nothing was generated
    done: Array  # bool[B], the row has produced an end-of-sequence id
    i: Array  # i32[], columns of `out` that are filled
    keys: Array  # one per row
    eos: Array  # i32[E]
    guess: Array | None = None  # i32[B], for a method that guesses: what may come after `token`


def begin(
    logits: Array, cache: Cache, key: Array, eos: Array, sampler: Sampler, length: int, first_row: Array | int = 0
) -> Carry:
    """The first token, from the prefill's logits f32[B V]; `length` is M, the most tokens to generate.

    first_row: the number i32[] of the first row, by which it draws.
    """
    keys = row_keys(key, logits.shape[0], first_row)
    out = jnp.full((logits.shape[0], length), -1, jnp.int32)
    done = jnp.zeros(logits.shape[0], bool)
    return _emit(Carry(cache, out[:, 0], out, done, jnp.int32(0), keys, eos), logits, sampler)


def step(params: Any, carry: Carry, sampler: Sampler, setting: Setting) -> Carry:
    """One token for every row; beside a guess where the method wants one, which is never kept."""
    logits, cache = passes.advance(params, fed(carry), carry.cache, setting, 1)
    return dataclasses.replace(after(carry, logits, sampler), cache=cache)


def fed(carry: Carry) -> Array:
    """i32[B 1|2]: what a step reads, each row's token, and its guess where there is one."""
    return jnp.stack([carry.token] if carry.guess is None else [carry.token, carry.guess], 1)


def after(carry: Carry, logits: Array, sampler: Sampler) -> Carry:
    """The next token and guess, from a step's logits f32[B 1|2 V]; the cache is left as it was."""
    if carry.guess is not None:
        carry = dataclasses.replace(carry, guess=_draw(carry, logits[:, 1], carry.i + 1, sampler))
    return _emit(carry, logits[:, 0], sampler)


def look_ahead(params: Any, carry: Carry, sampler: Sampler, setting: Setting) -> Carry:
    """Before the first step: guesses what follows the first token, and keeps nothing (SpeCache, Algorithm 2)."""
    logits, cache = passes.advance(params, carry.token[:, None], carry.cache, setting, 0)
    return dataclasses.replace(guessed(carry, logits, sampler), cache=cache)


def guessed(carry: Carry, logits: Array, sampler: Sampler) -> Carry:
    """The first guess, from the logits f32[B 1 V] of the first token."""
    return dataclasses.replace(carry, guess=_draw(carry, logits[:, 0], carry.i, sampler))


def _draw(carry: Carry, logits: Array, column: Array, s: Sampler) -> Array:
    """The tokens of one column. A guess for a column is drawn with its randomness: equal logits give equal tokens."""
    with jax.named_scope("sample"):
        return sample(s, logits, jax.vmap(jax.random.fold_in, (0, None))(carry.keys, column))


def _emit(carry: Carry, logits: Array, s: Sampler) -> Carry:
    token = _draw(carry, logits, carry.i, s)
    shown = jnp.where(carry.done, -1, token)
    out = lax.dynamic_update_slice(carry.out, shown[:, None], (0, carry.i))
    done = carry.done | (token[:, None] == carry.eos[None]).any(-1)
    return dataclasses.replace(carry, token=token, out=out, done=done, i=carry.i + 1)


def decode_until(params: Any, carry: Carry, limit: Array, sampler: Sampler, setting: Setting) -> Carry:
    """Steps until `limit` columns are filled or all rows are done."""

    def more(carry: Carry) -> Array:
        return (carry.i < limit) & ~carry.done.all()

    return lax.while_loop(more, lambda carry: step(params, carry, sampler, setting), carry)


def decode_fixed(params: Any, carry: Carry, sampler: Sampler, setting: Setting) -> Carry:
    """Steps until all M columns are filled, whatever the tokens."""

    def body(carry: Carry, _: None) -> tuple[Carry, None]:
        return step(params, carry, sampler, setting), None

    return lax.scan(body, carry, length=carry.out.shape[1] - 1)[0]


def _for_steps(params: Any, carry: Carry, setting: Setting, **_: Any) -> dict[str, str]:
    rows, config = len(carry.token) * (1 if carry.guess is None else 2), setting.config
    return product.options(rows, config.width, params["embedding"].dtype, config.tie_embeddings)


BEGIN = Program(begin, static=("length",), donate=("cache",))
BEGIN_BESIDE = Program(begin, static=("length",))
LOOK_AHEAD = Program(look_ahead, static=("setting",), donate=("carry",))
UNTIL = Program(decode_until, static=("setting",), donate=("carry",), options=_for_steps)
FIXED = Program(decode_fixed, static=("setting",), donate=("carry",), options=_for_steps)
AFTER = Program(after)
GUESSED = Program(guessed)


class ByLayer:
    """Steps of one batch layer by layer; the carry that goes in is used up."""

    def __init__(self, model: Model, sampler: Sampler, clock: Clock):
        self._sampler, self._clock = sampler, clock
        self._ahead = Stepper(model, clock, 0, in_place=True)
        self._steps = Stepper(model, clock, 1, in_place=True)

    def look_ahead(self, carry: Carry) -> Carry:
        """As `look_ahead`."""
        logits, cache = self._ahead.advance(carry.token[:, None], carry.cache)
        return self._then(GUESSED, carry, logits, cache)

    def step(self, carry: Carry) -> Carry:
        """As `step`."""
        logits, cache = self._steps.advance(fed(carry), carry.cache)
        return self._then(AFTER, carry, logits, cache)

    def _then(self, program: Program, carry: Carry, logits: Array, cache: Cache) -> Carry:
        without = dataclasses.replace(carry, cache=None)
        carry = self._clock.start(program, carry=without, logits=logits, sampler=self._sampler)
        return dataclasses.replace(carry, cache=cache)
