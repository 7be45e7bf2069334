"""Decoding under way: a batch with its cache, run step by step to its result."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.accounting import state_bytes
from kvjax.cache.contract import Cache
from kvjax.core.program import Program
from kvjax.core.random import seeded
from kvjax.core.types import Array, KvjaxError
from kvjax.models.model import Model
from kvjax.run import limits, stops
from kvjax.run.clock import Clock
from kvjax.run.forward import Setting, guesses
from kvjax.run.loop import BEGIN, BEGIN_BESIDE, FIXED, LOOK_AHEAD, UNTIL, ByLayer, Carry
from kvjax.run.result import Result
from kvjax.run.sampling import Sampler, SamplingParams
from kvjax.run.stops import Stop

LOOPS = "layers", "while", "scan"
LONG = 2048  # tokens from which on one program for the whole loop repays the time that it takes to compile


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


def decoding(
    model: Model,
    last: Array,
    cache: Cache,
    sampling: SamplingParams,
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int] | int | None = None,
    stop: Stop = (),
    loop: str | None = None,
    first_row: int = 0,
    keep: bool = False,
    clock: Clock | None = None,
) -> Decoding:
    """Starts decoding from a cache and the logits f32[B V] of its last token; options as in `generate`.

    first_row: the rows draw as those from this number on. The cache is used up, unless it is to be kept; then the loop
    works on a copy.
    """
    loop = chosen_loop(loop, stop, max_new_tokens)
    limits.check_decoding(model, cache, max_new_tokens)
    clock, stop, sampler = clock or Clock(), stops.strings(model, stop), sampling.sampler()
    prefill_seconds = clock.running
    carry = clock.call(
        BEGIN_BESIDE if keep else BEGIN,
        logits=last,
        cache=cache,
        key=seeded(sampling.seed),
        first_row=jnp.int32(first_row),
        eos=stops.end_ids(model, eos_ids),
        sampler=sampler,
        length=max_new_tokens,
    )
    begun = Decoding(model, carry, sampler, clock, prefill_seconds, stop, loop)
    if guesses(cache.plan) and max_new_tokens > 1:
        begun.look_ahead()
    return begun


def chosen_loop(loop: str | None, stop: Stop, max_new_tokens: int) -> str:
    """The loop that was asked for, or what suits the number of tokens and the machine."""
    if loop is None:
        return "layers" if max_new_tokens < LONG and jax.default_backend() == "cpu" else "while"
    if loop not in LOOPS:
        raise KvjaxError(f"loop must be {', '.join(map(repr, LOOPS[:-1]))} or {LOOPS[-1]!r}, got {loop!r}")
    if loop == "scan" and stop:
        raise KvjaxError("loop='scan' runs max_new_tokens whatever the tokens; leave stop out, or use loop='while'")
    return loop
