"""A batch that is being decoded: its cache and tokens, advanced step by step to a result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.accounting import state_bytes
from kvjax.cache.protocol import Cache
from kvjax.core import memory
from kvjax.core.mesh import is_shared, to_numpy
from kvjax.core.random import key_from_seed
from kvjax.core.types import Array
from kvjax.engine.decode import num_draft_tokens
from kvjax.engine.forward import Target
from kvjax.engine.sampling import Sampler
from kvjax.generation import decode_loop, user_warnings
from kvjax.generation.decode_loop import DecodeState
from kvjax.generation.finite import nonfinite_error
from kvjax.generation.inputs import place
from kvjax.generation.options import DecodeOptions
from kvjax.generation.programs import Timer, jit_loop, options_for, target_for
from kvjax.generation.result import Result, logprob_fields
from kvjax.generation.stopping import STOP_CHECK_INTERVAL, AnswerText
from kvjax.models.model import Model
from kvjax.processes import require_agreement
from kvjax.utils.mesh_context import leaves_callers_mesh, outside_callers_mesh


@dataclasses.dataclass
class DecodeSession:
    """A batch that is being decoded, and the seconds that it has taken."""

    model: Model
    state: DecodeState
    sampler: Sampler
    timer: Timer
    prefill_seconds: float
    weights: str = ""  # fingerprint of the model that filled the cache
    stop: tuple[str, ...] = ()  # strings at which the text of a sequence ends
    loop: str = "while"
    skip_special_tokens: bool = True  # whether special tokens are left out of the texts
    decode_seconds: float = 0.0

    def finish(self, limit: int | None = None) -> Result:
        """Decodes until all sequences have ended, by an id or a stop string, or have `limit` tokens, at most all."""
        limit = self.max_new_tokens if limit is None else limit
        if self.loop == "scan":
            with self._timed():
                self.state = self._compile(decode_loop.decode_fixed)(**self._arguments())
            return self.result()
        if not self.stop:
            self.advance(limit)
            return self.result()
        self._end_at_stop()
        while not self._is_done(limit):
            self.advance(min(limit, int(to_numpy(self.state.i)) + STOP_CHECK_INTERVAL))
            self._end_at_stop()
        return self.result()

    @leaves_callers_mesh
    def advance(self, limit: int) -> None:
        """Decodes up to `limit` tokens of each sequence."""
        with self._timed():
            if self.loop != "layers":
                self.state = self._compile(decode_loop.decode_until)(**self._arguments(), limit=np.int32(limit))
                return
            # The loop condition waits for each step: a batch that has ended must not run another one.
            arguments = self._arguments(in_one_program=False)
            while not self._is_done(limit):
                self.state = arguments["state"] = decode_loop.step(**arguments)

    @leaves_callers_mesh
    def draft_first(self) -> None:
        """Makes the first draft of a method that drafts; its time counts as a part of the prefill."""
        with self._timed():
            if self.loop == "layers":
                self.state = decode_loop.draft_first(**self._arguments(in_one_program=False))
            else:
                self.state = jit_loop(decode_loop.draft_first, self.state)(**self._arguments())
        self.prefill_seconds, self.decode_seconds = self.prefill_seconds + self.decode_seconds, 0.0

    def _is_done(self, limit: int) -> bool:
        return int(to_numpy(self.state.i)) >= limit or bool(to_numpy(self.state.done).all())

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        before = self.timer.run_seconds
        with self.timer.timed():
            yield
            jax.block_until_ready(self.state)
        self.decode_seconds += self.timer.run_seconds - before
        self.check_finite()

    def check_finite(self) -> None:
        """Raises KvjaxError where a token of a sequence was drawn from logits that are not finite."""
        is_finite = to_numpy(self.state.is_finite)
        if is_finite.all():
            return
        row = int(np.argmin(is_finite))
        num_tokens = len(self._token_lists()[row])
        raise nonfinite_error(self.model, f"after {num_tokens} new tokens of sequence {row}")

    def _arguments(self, in_one_program: bool = True) -> dict[str, Any]:
        target = Target(self.model.config, self.model.auto_mesh)
        if not in_one_program:
            target = target_for(self.model, self._tokens_per_step, in_place=True)
        return {"params": self.model.auto_params, "state": self.state, "sampler": self.sampler, "target": target}

    def _compile(self, loop: Callable[..., DecodeState]) -> Any:
        """Compiles a loop as one program, to which the state is donated."""
        config = self.model.config
        options = options_for(self._tokens_per_step, config.width, self.model.dtype, config.tie_embeddings)
        return jit_loop(loop, self.state, options)

    @property
    def _tokens_per_step(self) -> int:
        assert self.state.cache is not None
        return self.state.out.shape[0] * (1 + num_draft_tokens(self.state.cache.plan))

    @leaves_callers_mesh
    def program(self) -> str:
        """Returns the optimized HLO of the loop, for inspection."""
        jitted, arguments = self.loop_program()
        return jitted.lower(**arguments).compile().as_text()

    def loop_program(self) -> tuple[Any, dict[str, Any]]:
        """Returns the loop as one jitted program, and its keyword arguments."""
        return self._compile(decode_loop.decode_until), self._arguments() | {"limit": np.int32(0)}

    @property
    def cache(self) -> Cache:
        """The cache as it is now; the next step donates it."""
        assert self.state.cache is not None
        return dataclasses.replace(self.state.cache, weights=self.weights)

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that a sequence can get."""
        return self.state.out.shape[1]

    @property
    def tokens(self) -> np.ndarray:
        """i32[B n], all tokens so far, -1 after a sequence's end; the first came from the prefill."""
        return to_numpy(self.state.out)[:, : int(to_numpy(self.state.i))]

    def result(self) -> Result:
        """Returns the tokens so far, their text, and their costs."""
        self._end_at_stop()
        tokens, text = self._token_lists(), None
        if self.model.tokenizer is not None:
            if self.stop:
                tokens = [self._answer_text.shorten(row) for row in tokens]
            text = [self._answer_text.text(row) for row in tokens]
        return Result(
            tokens=tokens,
            text=text,
            finish_reasons=["stop" if done else "length" for done in to_numpy(self.state.done)],
            bytes=state_bytes(self.cache),
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            compile_seconds=self.timer.compile_seconds,
            decode_steps=int(to_numpy(self.state.i)) - 1,
            num_sequences=len(tokens),
            **logprob_fields(self.state.logprobs, tokens),
        )

    def columns(self) -> Iterator[list[int | None]]:
        """Yields the tokens of each step, one per sequence, None after a sequence's end."""
        for i in range(self.max_new_tokens):
            if i:
                self.advance(i + 1)
            with outside_callers_mesh():
                column = to_numpy(self.state.out[:, i])
            if (column < 0).all():
                return
            self._end_at_stop()
            yield [int(t) if t >= 0 else None for t in column]

    def text_deltas(self) -> Iterator[str]:
        """Yields the text of one sequence as it becomes final; the deltas add up to its text in `result`."""
        streamed = ""
        for _ in self.columns():
            text = self._answer_text.final_text(self._token_lists()[0])
            if len(text) > len(streamed):
                yield text[len(streamed) :]
                streamed = text
        yield self.result().text[0][len(streamed) :]

    def _token_lists(self) -> list[list[int]]:
        return [row[row >= 0].tolist() for row in to_numpy(self.state.out)]

    @functools.cached_property
    def _answer_text(self) -> AnswerText:
        eos_ids = to_numpy(self.state.eos).tolist()
        return AnswerText(self.model.text_tokenizer(), eos_ids, self.stop, self.skip_special_tokens)

    @leaves_callers_mesh
    def _end_at_stop(self) -> None:
        """Ends the sequences whose text contains a stop string."""
        if self.stop:
            ended = [self._answer_text.is_stopped(row) for row in self._token_lists()]
            self.state = dataclasses.replace(self.state, done=self.state.done | np.array(ended))


def start_decoding(
    model: Model,
    last: Array,
    cache: Cache,
    options: DecodeOptions,
    *,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    first_sequence: int = 0,
    keep: bool = False,
    timer: Timer | None = None,
) -> DecodeSession:
    """Starts decoding from a cache and the logits f32[B V] of its last token.

    Args:
      prompt_ids: all tokens before, where they are known; for a repetition penalty.
      first_sequence: the number by which the first sequence draws.
      keep: whether the loop works on a copy of the cache, which it would otherwise use up.
      timer: adds up the seconds; its run time so far counts as the prefill.
    """
    model, num_new = model.with_config(cache.config), options.max_new_tokens
    if is_shared(model.mesh):
        eos, shown = to_numpy(options.eos).tolist(), dataclasses.replace(options, eos=jnp.zeros(0))
        require_agreement(options=(shown, eos, first_sequence, keep))
    user_warnings.warn_of_positions(model, cache.plan, int(to_numpy(cache.length).max(initial=0)), num_new - 1)
    timer, sampler, in_prompt = timer or Timer(), options.sampling.sampler(), None
    if options.sampling.repetition_penalty != 1:
        mask = np.zeros((len(last), model.config.vocab_size), bool)
        for row, ids in zip(mask, prompt_ids or (), strict=True):
            row[np.asarray(ids)] = True
        in_prompt = place(model, mask, "B")
    prefill_seconds = timer.run_seconds
    with timer.timed():
        state = decode_loop.init_state(
            last,
            key_from_seed(options.sampling.seed),
            options.eos,
            sampler,
            num_tokens=num_new,
            first_sequence=np.int32(first_sequence),
            has_drafts=num_draft_tokens(cache.plan) > 0,
            in_prompt=in_prompt,
            num_top=options.num_top,
            mesh=model.auto_mesh,
        )
        if keep:
            # An explicit copy, each array in its own kind of memory: the loop donates the cache that it is given.
            cache = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), cache)
        if options.loop != "layers":
            cache = memory.to_loop_formats(cache)
        # Compiled loops serve all models of a configuration, so the state must not carry the weights' fingerprint.
        cache, weights = dataclasses.replace(cache, weights=""), cache.weights
        state = jax.block_until_ready(dataclasses.replace(state, cache=cache))
    session = DecodeSession(
        model,
        state,
        sampler,
        timer,
        prefill_seconds,
        weights,
        options.stop,
        options.loop,
        options.skip_special_tokens,
    )
    session.check_finite()
    if num_draft_tokens(cache.plan) and num_new > 1:
        session.draft_first()
    return session
