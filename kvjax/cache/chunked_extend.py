"""Splits calls of a layer's `extend` with more tokens than its method takes at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.protocol import LayerState, StepResult
from kvjax.core.types import Array, KVBlock, Partial
from kvjax.errors import KvjaxError

Extend = Callable[[LayerState, Array, KVBlock, int, Any, Partial | None], StepResult]
"""`BoundLayer.extend`."""


def extend_token_by_token(
    extend: Extend,
    state: LayerState,
    q: Array,
    new: KVBlock,
    commit: int,
    cross_layer: Any,
    outside: Partial | None,
) -> StepResult:
    """`BoundLayer.extend` as one call for each token; arguments and result are those of `extend`."""

    # Queries and partials have their T as axis 3, the new tokens and what layers hand up as axis 2.
    def step(state: LayerState, xs: tuple[Any, Any]):
        q, outside = jax.tree.map(lambda x: x[:, :, :, None], xs[0])
        new, cross_layer = jax.tree.map(lambda x: x[:, :, None], xs[1])
        out, state, cross_layer = extend(state, q, new, 1, cross_layer, outside)
        return state, (out[:, :, :, 0], jax.tree.map(lambda x: x[:, :, 0], cross_layer))

    steps = (
        jax.tree.map(lambda x: jnp.moveaxis(x, 3, 0), (q, outside)),
        jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), (new, cross_layer)),
    )
    state, outs = lax.scan(step, state, jax.tree.map(lambda x: x[:commit], steps))
    if commit < q.shape[3]:  # drafts see the ones before them, on a state that is then thrown away
        _, draft_outs = lax.scan(step, state, jax.tree.map(lambda x: x[commit:], steps))
        outs = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outs, draft_outs)
    out, cross_layer = outs
    return StepResult(jnp.moveaxis(out, 0, 3), state, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), cross_layer))


def extend_in_chunks(
    extend: Extend,
    state: LayerState,
    q: Array,
    new: KVBlock,
    commit: int,
    cross_layer: Any,
    outside: Partial | None,
    *,
    size: int,
) -> StepResult:
    """`BoundLayer.extend` in chunks of `size` tokens; drafts come last, in a call of their own."""
    T, whole = q.shape[3], commit // size * size
    if T - commit > size:
        raise KvjaxError(
            f"this method takes {size} tokens at a time and keeps all others of a longer call, got commit={commit} of "
            f"{T}; bring at most {size} that are not kept"
        )

    def call(state: LayerState, tokens: tuple[Any, KVBlock, Any], commit: int):
        queries, new, cross_layer = tokens
        q, outside = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 3), queries)
        out, state, cross_layer = extend(state, q, new, commit, cross_layer, outside)
        return state, (jnp.moveaxis(out, 3, 2), cross_layer)

    def split(x: Array) -> Array:
        return jnp.moveaxis(x[:, :, :whole].reshape(*x.shape[:2], -1, size, *x.shape[3:]), 2, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], whole, *x.shape[4:])

    # The scan compiles one program for all whole chunks; the rest, of another shape, is called on its own.
    queries = jax.tree.map(lambda x: jnp.moveaxis(x, 3, 2), (q, outside))
    tokens, outs = (queries, new, cross_layer), []  # all with T as axis 2
    if whole:
        state, out = lax.scan(lambda state, chunk: call(state, chunk, size), state, jax.tree.map(split, tokens))
        outs.append(jax.tree.map(join, out))
    for first, last, num_committed in ((whole, commit, commit - whole), (commit, T, 0)):
        if first < last:
            part = jax.tree.map(lambda x, at=slice(first, last): x[:, :, at], tokens)
            state, out = call(state, part, num_committed)
            outs.append(out)
    out, cross_layer = jax.tree.map(lambda *parts: jnp.concatenate(parts, 2), *outs)
    return StepResult(jnp.moveaxis(out, 2, 3), state, cross_layer)
