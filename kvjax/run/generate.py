"""Generation: whole results and streams, from prompts or from a cache."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.accounting import state_bytes
from kvjax.cache.contract import Cache, KVMethod
from kvjax.core.program import Program
from kvjax.core.random import seeded
from kvjax.core.shown import shortened, sizes, table
from kvjax.core.types import Array, KvjaxError
from kvjax.models.model import Model
from kvjax.run import by_layer, calls, limits, stops
from kvjax.run import prefill as prompt_runner
from kvjax.run.clock import Clock
from kvjax.run.finite import check_finite
from kvjax.run.forward import Setting, guesses
from kvjax.run.loop import BEGIN, BEGIN_BESIDE, FIXED, LOOK_AHEAD, UNTIL, ByLayer, Carry
from kvjax.run.plan import bind, checked
from kvjax.run.prompts import Prompts, token_ids
from kvjax.run.sampling import Sampler, row_keys, sampler
from kvjax.run.stops import Stop

LOOPS = "layers", "while", "scan"
LONG = 2048  # tokens from which on one program for the whole loop repays the time that it takes to compile


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """What `generate` returns; seconds are wall-clock, with compilation apart."""

    tokens: list[list[int]]
    text: list[str] | None  # None for a model without a tokenizer
    finish_reasons: list[str]  # "stop": an end-of-sequence id or a stop string; "length": max_new_tokens
    bytes: dict[str, int]  # of the KV state, by memory kind
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    decode_steps: int  # after the first token, which the prefill yields
    rows: int  # that each step decoded

    def __repr__(self) -> str:
        first = shortened(self.text[0]) if self.text else f"{len(self.tokens[0])} ids"
        more = f" and {len(self.tokens) - 1} more" if len(self.tokens) > 1 else ""
        return f"Result({first} [{self.finish_reasons[0]}]{more}; {self._costs()})"

    def _repr_html_(self) -> str:
        texts = self.text or [str(row) for row in self.tokens]
        lengths = map(len, self.tokens)
        rows = zip(range(len(texts)), texts, lengths, self.finish_reasons, strict=True)
        return table(self._costs(), ("row", "text" if self.text else "ids", "tokens", "ended by"), rows)

    def _costs(self) -> str:
        return f"{sizes(self.bytes)}, {self.tokens_per_second:,.1f} tokens/s"

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens of all rows per second of the decode loop; 0 when no step was run."""
        return self.decode_steps * self.rows / self.decode_seconds if self.decode_steps else 0.0


@dataclasses.dataclass
class Decoding:
    """A batch that is being decoded: how far it is, and what that took."""

    model: Model
    carry: Carry
    sampler: Sampler
    clock: Clock
    prefill_seconds: float
    stop: tuple[str, ...] = ()  # strings at which the text of a row ends
    loop: str = "while"
    decode_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._by_layer = ByLayer(self.model, self.sampler, self.clock)

    def finish(self, limit: int) -> Result:
        """Runs the loop until all rows have ended or have `limit` tokens, and looks for stop strings on the way."""
        if self.loop == "scan":
            self.run(FIXED)
            return self.result()
        if not self.stop:
            self.advance(limit)
            return self.result()
        self._end_rows()
        while int(self.carry.i) < limit and not np.asarray(self.carry.done).all():
            self.advance(min(limit, int(self.carry.i) + stops.LOOK))
            self._end_rows()
        return self.result()

    def advance(self, limit: int) -> None:
        """Runs the loop up to `limit` tokens per row."""
        if self.loop != "layers":
            self.run(UNTIL, limit=jnp.int32(limit))
            return
        with self._timed():
            while int(self.carry.i) < limit and not np.asarray(self.carry.done).all():
                self.carry = self._by_layer.step(self.carry)

    def look_ahead(self) -> None:
        """What a method that guesses needs before the first step; a part of the prefill."""
        if self.loop != "layers":
            self.run(LOOK_AHEAD)
        else:
            with self._timed():
                self.carry = self._by_layer.look_ahead(self.carry)
        self.prefill_seconds, self.decode_seconds = self.prefill_seconds + self.decode_seconds, 0.0

    def run(self, program: Program, **extra: Array) -> None:
        """Runs a program that turns the carry into the next one."""
        with self._timed():
            self.carry = self.clock.start(program, **self.arguments(), **extra)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        before = self.clock.running
        with self.clock.timed():
            yield
            jax.block_until_ready(self.carry)
        self.decode_seconds += self.clock.running - before

    def arguments(self) -> dict[str, Any]:
        """What the loop's programs take."""
        setting = Setting(self.model.config, self.model.mesh)
        return {"params": self.model.params, "carry": self.carry, "sampler": self.sampler, "setting": setting}

    def program(self) -> str:
        """The optimised program of the loop, for looking at."""
        return UNTIL.compile(**self.arguments(), limit=self.carry.i)[0].as_text()

    @property
    def cache(self) -> Cache:
        """The cache as it is now; the next step uses it up."""
        return self.carry.cache

    @property
    def tokens(self) -> np.ndarray:
        """i32[B n], all tokens so far, -1 where a row had ended; the first came from the prefill."""
        return np.asarray(self.carry.out)[:, : int(self.carry.i)]

    def result(self) -> Result:
        """What has been generated."""
        tokenizer, tokens = self.model.tokenizer, self._rows()
        if self.stop:
            tokens = [stops.shortest(tokenizer, row, self.stop) for row in tokens]
        return Result(
            tokens,
            None if tokenizer is None else [stops.before(self._text(row), self.stop) for row in tokens],
            ["stop" if done else "length" for done in np.asarray(self.carry.done)],
            state_bytes(self.carry.cache),
            self.prefill_seconds,
            self.decode_seconds,
            self.clock.compiling,
            int(self.carry.i) - 1,
            len(tokens),
        )

    def columns(self, count: int) -> Iterator[list[int | None]]:
        """Each step's tokens as they are made, one per row, None for rows that have ended."""
        for i in range(count):
            if i:
                self.advance(i + 1)
            column = np.asarray(self.carry.out[:, i])
            if (column < 0).all():
                return
            self._end_rows()
            yield [int(t) if t >= 0 else None for t in column]

    def pieces(self, count: int) -> Iterator[str]:
        """The text of one row as it is made, piece by piece; together they are its text in `result`."""
        shown = ""
        for _ in self.columns(count):
            text = stops.settled(self._text(self._rows()[0]), self.stop)
            if len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
        yield self.result().text[0][len(shown) :]

    def _rows(self) -> list[list[int]]:
        """The tokens of each row."""
        return [row[row >= 0].tolist() for row in np.asarray(self.carry.out)]

    def _text(self, row: list[int]) -> str:
        """The text of a row's tokens, without the id that ended it."""
        ended = bool(row) and row[-1] in np.asarray(self.carry.eos)
        return self.model.text_tokenizer().decode(row[:-1] if ended else row)

    def _end_rows(self) -> None:
        """Ends the rows whose text has a stop string."""
        if self.stop:
            found = np.array([stops.has_one(self._text(row), self.stop) for row in self._rows()])
            self.carry = dataclasses.replace(self.carry, done=self.carry.done | found)


def joined(results: Sequence[Result]) -> Result:
    """The results of batches that were decoded one after the other, as one; bytes are those of one batch."""

    def every(field: str) -> list:
        return [x for r in results for x in getattr(r, field)]

    def total(field: str) -> Any:
        return sum(getattr(r, field) for r in results)

    summed = ("prefill_seconds", "decode_seconds", "compile_seconds", "decode_steps")
    text = None if results[0].text is None else every("text")
    more = {field: total(field) for field in summed} | {"finish_reasons": every("finish_reasons")}
    return dataclasses.replace(results[0], tokens=every("tokens"), text=text, **more)


def decoding(
    model: Model,
    last: Array,
    cache: Cache,
    sampler: Sampler,
    *,
    max_new_tokens: int,
    seed: int = 0,
    eos_ids: tuple[int, ...] | None = None,
    stop: Stop = (),
    loop: str | None = None,
    keep: bool = False,
    clock: Clock | None = None,
) -> Decoding:
    """Starts decoding from a cache and the logits f32[B V] of its last token; options as in `generate`.

    The cache is used up, unless it is to be kept; then the loop works on a copy.
    """
    loop = _chosen(loop, stop, max_new_tokens)
    if max_new_tokens < 1:
        raise KvjaxError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    limits.check_decoding(model, cache, max_new_tokens)
    clock, stop = clock or Clock(), stops.strings(model, stop)
    prefill_seconds = clock.running
    eos = np.array(model.config.eos_ids if eos_ids is None else eos_ids, np.int32)
    carry = clock.call(
        BEGIN_BESIDE if keep else BEGIN,
        logits=last,
        cache=cache,
        keys=row_keys(seeded(seed), last.shape[0]),
        eos=jnp.asarray(eos),
        sampler=sampler,
        length=max_new_tokens,
    )
    begun = Decoding(model, carry, sampler, clock, prefill_seconds, stop, loop)
    if guesses(cache.plan) and max_new_tokens > 1:
        begun.look_ahead()
    return begun


def _chosen(loop: str | None, stop: Stop, max_new_tokens: int) -> str:
    """The loop that was asked for, or what suits the number of tokens and the machine."""
    if loop is None:
        return "layers" if max_new_tokens < LONG and jax.default_backend() == "cpu" else "while"
    if loop not in LOOPS:
        raise KvjaxError(f"loop must be {', '.join(map(repr, LOOPS[:-1]))} or {LOOPS[-1]!r}, got {loop!r}")
    if loop == "scan" and stop:
        raise KvjaxError("loop='scan' runs max_new_tokens whatever the tokens; leave stop out, or use loop='while'")
    return loop


def start(
    model: Model,
    prompts: Prompts,
    method: str | KVMethod | None = None,
    *,
    max_new_tokens: int = 64,
    seed: int = 0,
    eos_ids: tuple[int, ...] | None = None,
    stop: Stop = (),
    loop: str | None = None,
    capacity: int | None = None,
    cache: Cache | None = None,
    **sampling: Any,
) -> Decoding:
    """Reads the prompts and makes the first token of each row: decoding under way; arguments as in `generate`."""
    if max_new_tokens < 1:
        raise KvjaxError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    how, loop = sampler(**sampling), _chosen(loop, stop, max_new_tokens)
    ids, stop, clock = token_ids(model, prompts), stops.strings(model, stop), Clock()
    if cache is None:
        plan = bind(method, model.config)
        last, cache = prompt_runner.run(model, plan, ids, calls.room(ids, capacity, max_new_tokens), clock=clock)
        check_finite(model, ids, last)
    else:
        if capacity is not None:
            raise KvjaxError("capacity is the given cache's; leave it out, or prefill with a larger one")
        checked(model, cache, method)
        args = calls.fresh_inputs(model, ids, cache, max_new_tokens)
        with clock.timed():
            out, cache = jax.block_until_ready(by_layer.extend(model, **args, cache=cache, clock=clock))
        last = calls.at_row_ends(out, ids)
    more = {"max_new_tokens": max_new_tokens, "seed": seed, "eos_ids": eos_ids, "stop": stop, "loop": loop}
    return decoding(model, last, cache, how, **more, clock=clock)


def generate(
    model: Model,
    prompts: Prompts,
    method: str | KVMethod | None = None,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    eos_ids: tuple[int, ...] | None = None,
    stop: Stop = (),
    capacity: int | None = None,
    cache: Cache | None = None,
    state: Cache | None = None,
    loop: str | None = None,
) -> Result:
    """Continues each prompt (texts or lists of ids) under a method, or its string.

    A row's tokens depend on its own prompt and on (seed, row index), never on its neighbours.
    temperature, top_k, top_p, min_p, seed: how tokens are drawn, greedily by default. eos_ids: default the
    checkpoint's. stop: strings before which a row's text ends; its tokens end with the one that completes the string.
    capacity: tokens per row, default what is needed. cache: go on from it (of `prefill` or
    `extend`; it stays usable and knows its method), the prompts being what comes next. state: the older name of cache.
    loop: "layers" runs each step layer by layer, which takes one layer's time to compile; "while" is one program for
    all steps, the fastest once it is compiled; "scan" is another, which runs max_new_tokens whatever the tokens.
    Default: "layers" for fewer than 2,048 tokens on a CPU, "while" otherwise. All give the same tokens, up to rounding.
    """
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    ends = {"max_new_tokens": max_new_tokens, "eos_ids": eos_ids, "stop": stop, "loop": loop}
    given = state if cache is None else cache
    return start(model, prompts, method, capacity=capacity, cache=given, **drawn, **ends).finish(max_new_tokens)


def stream(
    model: Model,
    prompts: Prompts,
    method: str | KVMethod | None = None,
    *,
    max_new_tokens: int = 64,
    **options: Any,
) -> Iterator[list[int | None]]:
    """Each step's tokens as they are made, one per row, None for rows that have ended; options as in `generate`.

    It runs the very program that `generate` runs, one column at a time.
    """
    return start(model, prompts, method, max_new_tokens=max_new_tokens, **options).columns(max_new_tokens)


def stream_text(
    model: Model,
    prompt: str | Sequence[int],
    method: str | KVMethod | None = None,
    *,
    max_new_tokens: int = 64,
    **options: Any,
) -> Iterator[str]:
    """The text that continues one prompt, piece by piece as it is made; options as in `generate`."""
    model.text_tokenizer()  # a model without one is told before it reads
    return start(model, [prompt], method, max_new_tokens=max_new_tokens, **options).pieces(max_new_tokens)
