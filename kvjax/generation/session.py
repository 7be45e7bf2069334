"""Decoding under way: a batch with its cache, run step by step to its result."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache.accounting import state_bytes
from kvjax.cache.protocol import Cache
from kvjax.core.random import key_from_seed
from kvjax.core.types import Array
from kvjax.engine.decode import num_draft_tokens
from kvjax.engine.forward import Target
from kvjax.engine.sampling import Sampler, SamplingParams
from kvjax.errors import KvjaxError
from kvjax.generation import checks, stopping
from kvjax.generation import decode_loop as decode_loop
from kvjax.generation.compiled import compiled_for, jit_with, options_for
from kvjax.generation.decode_loop import DecodeState
from kvjax.generation.result import Result
from kvjax.generation.stopping import Stop
from kvjax.generation.timing import Timer
from kvjax.models.model import Model

LOOPS = "layers", "while", "scan"
LONG = 2048  # tokens from which on one program for the whole loop repays the time that it takes to compile


@dataclasses.dataclass
class DecodeSession:
    """A batch that is being decoded: how far it is, and what that took."""

    model: Model
    state: DecodeState
    sampler: Sampler
    timer: Timer
    prefill_seconds: float
    weights: str = ""  # fingerprint of the model that filled the cache
    stop: tuple[str, ...] = ()  # strings at which the text of a sequence ends
    loop: str = "while"
    decode_seconds: float = 0.0

    def finish(self, limit: int) -> Result:
        """Runs the loop until all sequences have ended or have `limit` tokens; looks for stop strings on the way."""
        if self.loop == "scan":
            with self._timed():
                self.state = self._program(decode_loop.decode_fixed)(**self._arguments())
            return self.result()
        if not self.stop:
            self.advance(limit)
            return self.result()
        self._end_rows()
        while int(self.state.i) < limit and not np.asarray(self.state.done).all():
            self.advance(min(limit, int(self.state.i) + stopping.LOOK))
            self._end_rows()
        return self.result()

    def advance(self, limit: int) -> None:
        """Runs the loop up to `limit` tokens of each sequence."""
        with self._timed():
            if self.loop != "layers":
                self.state = self._program(decode_loop.decode_until)(**self._arguments(), limit=np.int32(limit))
                return
            compiled, arguments = self._compiled(), self._arguments()
            while int(self.state.i) < limit and not np.asarray(self.state.done).all():
                self.state = arguments["state"] = decode_loop.step(**arguments, compiled=compiled)

    def draft_first(self) -> None:
        """Makes the first draft, for a method with drafts; it counts as a part of the prefill."""
        with self._timed():
            if self.loop == "layers":
                self.state = decode_loop.draft_first(**self._arguments(), compiled=self._compiled())
            else:
                draft_first = jit_with(decode_loop.draft_first, ("target",), ("state",))
                self.state = draft_first(**self._arguments())
        self.prefill_seconds, self.decode_seconds = self.prefill_seconds + self.decode_seconds, 0.0

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        before = self.timer.run_seconds
        with self.timer.timed():
            yield
            jax.block_until_ready(self.state)
        self.decode_seconds += self.timer.run_seconds - before

    def _arguments(self) -> dict[str, Any]:
        target = Target(self.model.config, self.model.mesh)
        return {"params": self.model.params, "state": self.state, "sampler": self.sampler, "target": target}

    def _compiled(self) -> Any:
        """The functions that a step which runs layer by layer calls."""
        return compiled_for(self.model, self.state.out.shape[0] * self._tokens_a_step, in_place=True)

    def _program(self, loop: Callable[..., DecodeState]) -> Callable[..., DecodeState]:
        """The loop, compiled as one program that is given the state."""
        config, num_tokens = self.model.config, self.state.out.shape[0] * self._tokens_a_step
        options = options_for(num_tokens, config.width, self.model.dtype, config.tie_embeddings)
        return jit_with(loop, ("target",), ("state",), options)

    @property
    def _tokens_a_step(self) -> int:
        assert self.state.cache is not None
        return 1 + num_draft_tokens(self.state.cache.plan)

    def program(self) -> str:
        """The optimized program of the loop, for looking at."""
        jitted, arguments = self.loop_program()
        return jitted.lower(**arguments).compile().as_text()

    def loop_program(self) -> tuple[Any, dict[str, Any]]:
        """The loop as one jitted program, and what it is called with."""
        return self._program(decode_loop.decode_until), self._arguments() | {"limit": np.int32(0)}

    @property
    def cache(self) -> Cache:
        """The cache as it is now; the next step uses it up."""
        assert self.state.cache is not None
        return dataclasses.replace(self.state.cache, weights=self.weights)

    @property
    def tokens(self) -> np.ndarray:
        """i32[B n], all tokens so far, -1 where a row had ended; the first came from the prefill."""
        return np.asarray(self.state.out)[:, : int(self.state.i)]

    def result(self) -> Result:
        """What has been generated."""
        tokenizer, tokens = self.model.tokenizer, self._rows()
        if self.stop and tokenizer is not None:
            tokens = [stopping.shortest(tokenizer, row, self.stop) for row in tokens]
        return Result(
            tokens,
            None if tokenizer is None else [stopping.before(self._text(row), self.stop) for row in tokens],
            ["stop" if done else "length" for done in np.asarray(self.state.done)],
            state_bytes(self.cache),
            self.prefill_seconds,
            self.decode_seconds,
            self.timer.compile_seconds,
            int(self.state.i) - 1,
            len(tokens),
        )

    def columns(self, count: int) -> Iterator[list[int | None]]:
        """Each step's tokens as they are made, one per row, None for rows that have ended."""
        for i in range(count):
            if i:
                self.advance(i + 1)
            column = np.asarray(self.state.out[:, i])
            if (column < 0).all():
                return
            self._end_rows()
            yield [int(t) if t >= 0 else None for t in column]

    def pieces(self, count: int) -> Iterator[str]:
        """The text of one row as it is made, piece by piece; together they are its text in `result`."""
        shown = ""
        for _ in self.columns(count):
            text = stopping.settled(self._text(self._rows()[0]), self.stop)
            if len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
        yield self.result().text[0][len(shown) :]

    def _rows(self) -> list[list[int]]:
        """The tokens of each row."""
        return [row[row >= 0].tolist() for row in np.asarray(self.state.out)]

    def _text(self, row: list[int]) -> str:
        """The text of a row's tokens, without the id that ended it."""
        ended = bool(row) and row[-1] in np.asarray(self.state.eos)
        return self.model.text_tokenizer().decode(row[:-1] if ended else row)

    def _end_rows(self) -> None:
        """Ends the rows whose text has a stop string."""
        if self.stop:
            found = np.array([stopping.has_one(self._text(row), self.stop) for row in self._rows()])
            self.state = dataclasses.replace(self.state, done=self.state.done | found)


def start_decoding(
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
    timer: Timer | None = None,
) -> DecodeSession:
    """Starts decoding from a cache and the logits f32[B V] of its last token; options as in `generate`.

    first_row: the sequences draw as those from this number on. The cache is used up, unless it is to be kept; then the
    loop works on a copy.
    """
    loop = resolve_loop(loop, stop, max_new_tokens)
    checks.check_decoding(model, cache, max_new_tokens)
    timer, stop, sampler = timer or Timer(), stopping.strings(model, stop), sampling.sampler()
    prefill_seconds = timer.run_seconds
    with timer.timed():
        state = decode_loop.begin(
            last,
            key_from_seed(sampling.seed),
            stopping.end_ids(model, eos_ids),
            sampler,
            num_tokens=max_new_tokens,
            first_row=np.int32(first_row),
            has_drafts=num_draft_tokens(cache.plan) > 0,
        )
        if keep:
            cache = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), cache)
        # Compiled loops serve all models of a configuration, so that the state does not carry the weights' fingerprint.
        cache, weights = dataclasses.replace(cache, weights=""), cache.weights
        state = jax.block_until_ready(dataclasses.replace(state, cache=cache))
    session = DecodeSession(model, state, sampler, timer, prefill_seconds, weights, stop, loop)
    if num_draft_tokens(cache.plan) and max_new_tokens > 1:
        session.draft_first()
    return session


def resolve_loop(loop: str | None, stop: Stop, max_new_tokens: int) -> str:
    """The loop that was asked for, or what suits the number of tokens and the machine."""
    if loop is None:
        return "layers" if max_new_tokens < LONG and jax.default_backend() == "cpu" else "while"
    if loop not in LOOPS:
        raise KvjaxError(f"loop must be {', '.join(map(repr, LOOPS[:-1]))} or {LOOPS[-1]!r}, got {loop!r}")
    if loop == "scan" and stop:
        raise KvjaxError("loop='scan' runs max_new_tokens whatever the tokens; leave stop out, or use loop='while'")
    return loop
