"""kvjax as a benchmark drives it: one decode loop, in slices that can be timed."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.generation.reuse.full_kv import full_kv_from_arrays


class Ours:
    """Greedy decoding of a batch under one method, in slices of a compiled loop."""

    def __init__(self, model: kvjax.Model, method: kvjax.Method):
        self.model, self.method = model, method

    def prefill(self, ids: np.ndarray, room: int = 0, chunk: int | None = None) -> float:
        """Runs the prompts i32[B T], keeping space for `room` more tokens per row; returns seconds."""
        start = time.perf_counter()
        context = kvjax.read(self.model, ids, self.method, room=room, chunk=chunk)
        jax.block_until_ready((context.last, context.cache))
        seconds = time.perf_counter() - start
        self.begin(context, room)
        return seconds

    def begin(self, context: kvjax.Context, room: int) -> None:
        """Starts decoding `room` tokens behind a context, which is used up; one more comes from its logits."""
        self.run = context.start(max_new_tokens=room + 1, eos_ids=(), loop="while", use_up=True)

    def decode(self, steps: int) -> float:
        """Decodes `steps` more tokens per row; returns seconds, compilation apart."""
        before = self.run.decode_seconds
        self.run.advance(self.tokens.shape[1] + steps)
        return self.run.decode_seconds - before

    def program(self) -> str:
        """The optimised program of the decode loop."""
        return self.run.program()

    @property
    def cache(self) -> kvjax.Cache:
        """What the loop holds now."""
        return self.run.cache

    @property
    def tokens(self) -> np.ndarray:
        """i32[B n], all tokens so far; the first came from the prefill."""
        return self.run.tokens


def random_loop(model: kvjax.Model, method: str | kvjax.Method, batch: int, tokens: int, room: int) -> Ours:
    """A decode loop on `batch` rows of `tokens` random keys and values, with room for exactly so many more."""
    c = model.config
    shape = (batch, c.kv_heads, tokens, c.head_dim)

    def draw(layer: int, which: int) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(jax.random.key(layer), which), shape, model.dtype)

    pairs = [(draw(i, 0), draw(i, 1)) for i in range(c.layers)]
    loop = Ours(model, method)
    exact = full_kv_from_arrays(model, pairs, jnp.full((batch,), tokens, jnp.int32))
    loop.begin(exact.under(method, tokens + room), room)
    return loop
