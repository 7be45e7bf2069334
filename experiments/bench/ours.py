"""kvjax as a benchmark drives it: the only file here that knows how generation is put together."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.run.generate import BEGIN, LOOK_AHEAD, UNTIL
from kvjax.run.sampling import row_keys, sampler


class Ours:
    """Greedy decoding of a batch under one method, in slices of a compiled loop."""

    def __init__(self, model: kvjax.Model, method: kvjax.Method):
        self.model, self.method = model, method
        self.sampler = sampler(0.0, None, None, None)

    def prefill(self, ids: np.ndarray, room: int = 0, chunk: int | None = None) -> float:
        """Runs the prompts i32[B T], keeping space for `room` more tokens per row; returns seconds."""
        capacity = ids.shape[1] + room
        start = time.perf_counter()
        answer = kvjax.prefill(self.model, ids, self.method, capacity=capacity, chunk=chunk)
        last, state = jax.block_until_ready(answer)
        seconds = time.perf_counter() - start
        self.begin(last, state, room)
        return seconds

    def begin(self, last: jax.Array, state: kvjax.State, room: int) -> None:
        """Starts decoding from a state and the logits f32[B V] of its last token."""
        self.carry = BEGIN(
            logits=last,
            state=state,
            keys=row_keys(jax.random.key(0), last.shape[0]),
            eos=jnp.zeros((0,), jnp.int32),
            sampler=self.sampler,
            length=room + 1,
        )
        self.setting = kvjax.run.api.setting(self.model, self.method, state.capacity)
        if self.method.lookahead:
            args = {"params": self.model.params, "carry": self.carry, "sampler": self.sampler}
            self.carry = LOOK_AHEAD(**args, setting=self.setting)

    def decode(self, steps: int) -> float:
        """Decodes `steps` more tokens per row; returns seconds, compilation apart."""
        args = {
            "params": self.model.params,
            "carry": self.carry,
            "limit": self.carry.i + steps,
            "sampler": self.sampler,
        }
        run, _ = UNTIL.compile(**args, setting=self.setting)
        start = time.perf_counter()
        self.carry = jax.block_until_ready(run(**args))
        return time.perf_counter() - start

    def program(self) -> str:
        """The optimised program of the decode loop."""
        args = {"params": self.model.params, "carry": self.carry, "limit": self.carry.i, "sampler": self.sampler}
        return UNTIL.compile(**args, setting=self.setting)[0].as_text()

    @property
    def tokens(self) -> np.ndarray:
        """i32[B n], all tokens so far; the first came from the prefill."""
        return np.asarray(self.carry.out)[:, : int(self.carry.i)]
