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

from kvjax import api, forward
from kvjax.forward import Setting
from kvjax.kv.accounting import state_bytes
from kvjax.kv.method import Method, State
from kvjax.model import Model
from kvjax.program import Program
from kvjax.prompts import Prompts, pad, token_ids
from kvjax.sampling import Sampler, row_keys, sample, sampler
from kvjax.types import Array, KvjaxError, pytree


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


def begin(logits: Array, state: State, keys: Array, eos: Array, sampler: Sampler, length: int) -> Carry:
    """The first token, from the prefill's logits f32[B V]; `length` is M, the most tokens to generate."""
    out = jnp.full((logits.shape[0], length), -1, jnp.int32)
    done = jnp.zeros(logits.shape[0], bool)
    return _emit(Carry(state, out[:, 0], out, done, jnp.int32(0), keys, eos), logits, sampler)


def step(params: Any, carry: Carry, sampler: Sampler, setting: Setting) -> Carry:
    """One token for every row."""
    logits, state = forward.extend(params, carry.token[:, None], carry.state, setting)
    return _emit(dataclasses.replace(carry, state=state), logits[:, 0], sampler)


def _emit(carry: Carry, logits: Array, s: Sampler) -> Carry:
    with jax.named_scope("sample"):
        token = sample(s, logits, jax.vmap(jax.random.fold_in, (0, None))(carry.keys, carry.i))
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
        program, extra = (UNTIL, {"limit": jnp.int32(limit)}) if loop == "while" else (FIXED, {})
        args = {"params": self.model.params, "carry": self.carry, "sampler": self.sampler, **extra}
        run, seconds = program.compile(**args, setting=self.setting)
        self.compile_seconds += seconds
        start = time.perf_counter()
        self.carry = jax.block_until_ready(run(**args))
        return time.perf_counter() - start


def _start(model, prompts, method, max_new_tokens, s, seed, eos_ids, capacity) -> _Run:
    if max_new_tokens < 1:
        raise KvjaxError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    ids = token_ids(model, prompts)
    setting = api.setting(model, method, api.room(ids, capacity, max_new_tokens))
    tokens, lengths = pad(ids)
    args = {
        "params": model.params,
        "tokens": api.place(model, tokens, "B T"),
        "lengths": api.place(model, lengths, "B"),
    }
    run, compile_seconds = api.PREFILL.compile(**args, setting=setting)
    start = time.perf_counter()
    logits, state = jax.block_until_ready(run(**args))
    seconds = time.perf_counter() - start
    eos = np.array(model.config.eos_ids if eos_ids is None else eos_ids, np.int32)
    args = {
        "logits": logits,
        "state": state,
        "keys": row_keys(jax.random.key(seed), len(ids)),
        "eos": jnp.asarray(eos),
        "sampler": s,
    }
    run, more = BEGIN.compile(**args, length=max_new_tokens)
    return _Run(model, run(**args), s, setting, seconds, compile_seconds + more)


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
    loop: str = "while",
) -> Result:
    """Continues each prompt (texts or lists of ids) under a method.

    A row's tokens depend on its own prompt and on (seed, row index), never on its neighbours. eos_ids: default the
    checkpoint's. capacity: tokens per row, default what is needed. loop: "while" stops when all rows have ended,
    "scan" runs max_new_tokens whatever the tokens.
    """
    if loop not in ("while", "scan"):
        raise KvjaxError(f"loop must be 'while' or 'scan', got {loop!r}")
    s = sampler(temperature, top_k, top_p, min_p)
    run = _start(model, prompts, method, max_new_tokens, s, seed, eos_ids, capacity)
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
) -> Iterator[list[int | None]]:
    """Yields each step's tokens as they are made, one per row, None for rows that have ended; same as `generate`.

    It runs the very program that `generate` runs, one column at a time.
    """
    s = sampler(temperature, top_k, top_p, min_p)
    run = _start(model, prompts, method, max_new_tokens, s, seed, eos_ids, capacity)
    for i in range(max_new_tokens):
        if i:
            run.advance(i + 1)
        column = np.asarray(run.carry.out[:, i])
        if (column < 0).all():
            return
        yield [int(t) if t >= 0 else None for t in column]
