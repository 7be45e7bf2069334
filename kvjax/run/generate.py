"""Generation: one compiled loop serves whole results, fixed lengths and streams."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.accounting import state_bytes
from kvjax.cache.contract import State
from kvjax.cache.method import Method
from kvjax.core.program import Program
from kvjax.core.types import Array, KvjaxError, pytree
from kvjax.models.model import Model
from kvjax.run import api, forward
from kvjax.run.forward import Setting
from kvjax.run.prompts import Prompts, pad, token_ids
from kvjax.run.sampling import Sampler, row_keys, sample, sampler


@pytree
class Carry:
    """The decode loop's state: `token` has been sampled and is in `out`, but not in the cache yet."""

    state: State
    token: Array  # i32[B]
    out: Array  # i32[B M], -1 where nothing was generated
    done: Array  # bool[B], the row has produced an end-of-sequence id
    i: Array  # i32[], columns of `out` that are filled
    keys: Array  # one per row
    eos: Array  # i32[E]
    guess: Array | None = None  # i32[B], for a method with lookahead: what may come after `token`


def begin(logits: Array, state: State, keys: Array, eos: Array, sampler: Sampler, length: int) -> Carry:
    """The first token, from the prefill's logits f32[B V]; `length` is M, the most tokens to generate."""
    out = jnp.full((logits.shape[0], length), -1, jnp.int32)
    done = jnp.zeros(logits.shape[0], bool)
    return _emit(Carry(state, out[:, 0], out, done, jnp.int32(0), keys, eos), logits, sampler)


def step(params: Any, carry: Carry, sampler: Sampler, setting: Setting) -> Carry:
    """One token for every row; under lookahead beside a guess, which is never kept."""
    tokens = jnp.stack([carry.token] if carry.guess is None else [carry.token, carry.guess], 1)
    logits, state = forward.advance(params, tokens, carry.state, setting, 1)
    carry = dataclasses.replace(carry, state=state)
    if carry.guess is not None:
        carry = dataclasses.replace(carry, guess=_draw(carry, logits[:, 1], carry.i + 1, sampler))
    return _emit(carry, logits[:, 0], sampler)


def look_ahead(params: Any, carry: Carry, sampler: Sampler, setting: Setting) -> Carry:
    """Before the first step: guesses what follows the first token, and keeps nothing (SpeCache, Algorithm 2)."""
    logits, state = forward.advance(params, carry.token[:, None], carry.state, setting, 0)
    return dataclasses.replace(carry, state=state, guess=_draw(carry, logits[:, 0], carry.i, sampler))


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
    more = lambda c: (c.i < limit) & ~c.done.all()  # noqa: E731
    return lax.while_loop(more, lambda c: step(params, c, sampler, setting), carry)


def decode_fixed(params: Any, carry: Carry, sampler: Sampler, setting: Setting) -> Carry:
    """Steps until all M columns are filled, whatever the tokens."""
    body = lambda c, _: (step(params, c, sampler, setting), None)  # noqa: E731
    return lax.scan(body, carry, length=carry.out.shape[1] - 1)[0]


BEGIN = Program(begin, static=("length",), donate=("state",))
LOOK_AHEAD = Program(look_ahead, static=("setting",), donate=("carry",))
UNTIL = Program(decode_until, static=("setting",), donate=("carry",))
FIXED = Program(decode_fixed, static=("setting",), donate=("carry",))


@dataclasses.dataclass(frozen=True)
class Result:
    """What `generate` returns; seconds are wall-clock, with compilation apart."""

    tokens: list[list[int]]
    text: list[str] | None  # None for a model without a tokenizer
    finish_reasons: list[str]  # "stop": an end-of-sequence id; "length": max_new_tokens
    bytes: dict[str, int]  # of the KV state, by memory kind
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    decode_steps: int  # after the first token, which the prefill yields

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens of all rows per second of the decode loop; 0 when no step was run."""
        return self.decode_steps * len(self.tokens) / self.decode_seconds if self.decode_steps else 0.0


@dataclasses.dataclass
class _Run:
    """A prefilled batch on its way."""

    model: Model
    carry: Carry
    sampler: Sampler
    setting: Setting
    prefill_seconds: float
    compile_seconds: float

    def advance(self, limit: int, loop: str = "while") -> float:
        """Runs the loop up to `limit` columns; returns its seconds."""
        return self.run(UNTIL, limit=jnp.int32(limit)) if loop == "while" else self.run(FIXED)

    def run(self, program: Program, **extra: Array) -> float:
        """Runs a program that turns the carry into the next one; returns its seconds, compilation apart."""
        args = {"params": self.model.params, "carry": self.carry, "sampler": self.sampler, **extra}
        run, seconds = program.compile(**args, setting=self.setting)
        self.compile_seconds += seconds
        start = time.perf_counter()
        self.carry = jax.block_until_ready(run(**args))
        return time.perf_counter() - start


def _start(model, prompts, method, s, *, max_new_tokens, seed, eos_ids, capacity, state) -> _Run:
    if max_new_tokens < 1:
        raise KvjaxError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    ids = token_ids(model, prompts)
    run, args, setting, compile_seconds = _first_pass(model, ids, method, max_new_tokens, capacity, state)
    start = time.perf_counter()
    logits, state = jax.block_until_ready(run(**args))
    seconds = time.perf_counter() - start
    if logits.ndim == 3:  # of all fresh tokens: only each row's last one matters
        last = jnp.array([len(r) - 1 for r in ids])
        logits = jnp.take_along_axis(logits, last[:, None, None], 1)[:, 0]
    eos = np.array(model.config.eos_ids if eos_ids is None else eos_ids, np.int32)
    keys = row_keys(jax.random.key(seed), len(ids))
    args = {"logits": logits, "state": state, "keys": keys, "eos": jnp.asarray(eos), "sampler": s}
    run, more = BEGIN.compile(**args, length=max_new_tokens)
    setting = dataclasses.replace(setting, slots=())  # a step's shapes are the state's
    begun = _Run(model, run(**args), s, setting, seconds, compile_seconds + more)
    if method.lookahead and max_new_tokens > 1:
        begun.prefill_seconds += begun.run(LOOK_AHEAD)
    return begun


def _first_pass(model, ids, method, max_new_tokens, capacity, state):
    """The program that runs the prompts, its arguments, its setting, and its compile time."""
    if state is None:
        setting = api.setting(model, method, api.room(ids, capacity, max_new_tokens), [len(row) for row in ids])
        program, args = api.PREFILL, api.inputs(model, *pad(ids))
    else:
        if capacity is not None:
            raise KvjaxError("capacity is the given state's; leave it out, or prefill with a larger one")
        setting = api.setting(model, method, state.capacity)
        program, args = api.EXTEND, {**api.fresh_inputs(model, ids, state, max_new_tokens), "state": state}
    args["params"] = model.params
    run, seconds = program.compile(**args, setting=setting)
    return run, args, setting, seconds


def generate(
    model: Model,
    prompts: Prompts,
    method: Method,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    eos_ids: tuple[int, ...] | None = None,
    capacity: int | None = None,
    state: State | None = None,
    loop: str = "while",
) -> Result:
    """Continues each prompt (texts or lists of ids) under a method.

    A row's tokens depend on its own prompt and on (seed, row index), never on its neighbours. eos_ids: default the
    checkpoint's. capacity: tokens per row, default what is needed. state: go on from it (of `prefill` or `extend`,
    under the same method; it stays usable), the prompts being what comes next. loop: "while" stops when all rows
    have ended, "scan" runs max_new_tokens whatever the tokens.
    """
    if loop not in ("while", "scan"):
        raise KvjaxError(f"loop must be 'while' or 'scan', got {loop!r}")
    s = sampler(temperature, top_k, top_p, min_p)
    more = {"max_new_tokens": max_new_tokens, "seed": seed, "eos_ids": eos_ids, "capacity": capacity, "state": state}
    run = _start(model, prompts, method, s, **more)
    seconds = run.advance(max_new_tokens, loop)
    out, done, steps = (np.asarray(x) for x in (run.carry.out, run.carry.done, run.carry.i))
    tokens = [row[row >= 0].tolist() for row in out]
    return Result(
        tokens,
        None if model.tokenizer is None else [model.tokenizer.decode(t) for t in tokens],
        ["stop" if d else "length" for d in done],
        state_bytes(run.carry.state),
        run.prefill_seconds,
        seconds,
        run.compile_seconds,
        int(steps) - 1,
    )


def stream(
    model: Model,
    prompts: Prompts,
    method: Method,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    eos_ids: tuple[int, ...] | None = None,
    capacity: int | None = None,
    state: State | None = None,
) -> Iterator[list[int | None]]:
    """Each step's tokens as they are made, one per row, None for rows that have ended; arguments as in `generate`.

    It runs the very program that `generate` runs, one column at a time.
    """
    s = sampler(temperature, top_k, top_p, min_p)
    more = {"max_new_tokens": max_new_tokens, "seed": seed, "eos_ids": eos_ids, "capacity": capacity, "state": state}
    return _columns(_start(model, prompts, method, s, **more), max_new_tokens)


def _columns(run: _Run, count: int) -> Iterator[list[int | None]]:
    for i in range(count):
        if i:
            run.advance(i + 1)
        column = np.asarray(run.carry.out[:, i])
        if (column < 0).all():
            return
        yield [int(t) if t >= 0 else None for t in column]
