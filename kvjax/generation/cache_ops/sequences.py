"""Caches as values: back to fewer tokens, some of their rows, each row several times, several caches as one batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kvjax.cache.protocol import BoundLayer, Cache, RewindableLayer
from kvjax.cache.state import CONTEXT_REMEDY, concat_sequences, missing_ability, take_sequences
from kvjax.core.mesh import check_divides, per_device
from kvjax.core.types import Array
from kvjax.errors import IncompatibleMethod, KvjaxError, OtherWeights
from kvjax.utils import arguments


def crop(cache: Cache, lengths: int | Sequence[int]) -> Cache:
    """The cache with only the first so many tokens of each row: one number for all, or one for each.

    Exact: what comes next is as if the last tokens had never come. Raises IncompatibleMethod where these cannot be
    taken back, because the method has chosen among the tokens, or holds them in groups that more tokens have filled.
    """
    cache.check_usable()
    wanted, held = per_row(lengths, cache, "lengths"), held_tokens(cache)
    for row, (length, most) in enumerate(zip(wanted, held, strict=True)):
        if not 0 <= length <= most:
            raise KvjaxError(f"row {row} has {most} tokens and cannot be cropped to {length}; give 0..{most}")
    count = held - wanted
    for i, (layer, state) in enumerate(zip(cache.plan, cache.layers, strict=True)):
        if not isinstance(layer, RewindableLayer):
            raise missing_ability(layer, "give back tokens")
        undoable = np.asarray(layer.max_rollback(state))
        for row in np.flatnonzero(count > undoable)[:1]:
            raise IncompatibleMethod(
                f"row {row} of layer {i} cannot give back its last {count[row]} tokens, {undoable[row]} at most: "
                f"those before lie in groups that are coded for good, or in a shared prefix; crop to "
                f"{held[row] - undoable[row]} tokens or more; {CONTEXT_REMEDY}"
            )
    fewer = jnp.asarray(count, jnp.int32)
    layers = cropped(cache.layers, fewer, plan=cache.plan, heads=cache.config.kv_heads, mesh=mesh_of(cache))
    return dataclasses.replace(cache, layers=layers, length=cache.length - fewer)


@functools.partial(jax.jit, static_argnames=("plan", "heads", "mesh"))
def cropped(
    layers: tuple[Any, ...], count: Array, plan: tuple[BoundLayer, ...], heads: int, mesh: Mesh | None
) -> tuple:
    """The states of all layers without the last count i32[B] tokens of each row, which can be taken back."""

    def one(layer: BoundLayer, state: Any) -> Any:
        if not isinstance(layer, RewindableLayer):
            raise missing_ability(layer, "give back tokens")
        return per_device(layer.crop, count.shape[0], heads, mesh)(state, count)

    return tuple(map(one, plan, layers))


def rows(cache: Cache, which: Sequence[int]) -> Cache:
    """The rows of these numbers, in this order, each as often as it is named: any method, bit by bit."""
    cache.check_usable()
    chosen = np.asarray(which)
    B = cache.length.shape[0]
    if chosen.ndim != 1 or not chosen.size or not np.issubdtype(chosen.dtype, np.integer):
        raise KvjaxError(f"rows are named by a list of one number or more, got {which!r}")
    if chosen.min() < 0 or chosen.max() >= B:
        raise KvjaxError(f"the cache has rows 0..{B - 1}, got {which!r}")
    mesh = mesh_of(cache)
    if mesh is not None:
        check_divides("B", len(chosen), mesh, "take a number of rows that does")
    at = jnp.asarray(chosen, jnp.int32)
    layers = tuple(take_sequences(layer, state, at) for layer, state in zip(cache.plan, cache.layers, strict=True))
    return dataclasses.replace(cache, layers=layers, length=take_sequences(None, cache.length, at))


def branch(cache: Cache, times: int) -> Cache:
    """Each row so many times, the copies of a row next to each other."""
    return rows(cache, branches(cache.length.shape[0], times))


def branches(count: int, times: int) -> list[int]:
    """The numbers of so many rows, each named so many times."""
    return np.repeat(np.arange(count), arguments.integer("times", times)).tolist()


def join(caches: Sequence[Cache]) -> Cache:
    """The rows of several caches of one method and model as one batch, bit by bit.

    Raises KvjaxError for caches of unlike room: read their documents with the same `capacity`, and where a method drops
    tokens of a prompt, with documents of like length.
    """
    if not caches:
        raise KvjaxError("no caches were given; pass one or more")
    for cache in caches:
        cache.check_usable()
    first = caches[0]
    for i, cache in enumerate(caches[1:], 1):
        if cache.weights and first.weights and cache.weights != first.weights:
            raise OtherWeights(f"cache {i} is of a model with other weights than cache 0; join those of one model")
        if cache.config != first.config or cache.plan != first.plan:
            raise KvjaxError(f"cache {i} is of another model or method than cache 0; join those of one")
        if cache.capacity != first.capacity:
            raise KvjaxError(
                f"cache {i} has room for {cache.capacity} tokens per row and cache 0 for {first.capacity}; read their "
                "documents with one capacity"
            )
    layers = []
    for i, layer in enumerate(first.plan):
        try:
            layers.append(concat_sequences(layer, [cache.layers[i] for cache in caches]))
        except ValueError as e:
            raise KvjaxError(
                f"layer {i} of these caches is held in unlike shapes ({e}); read documents of like length with one "
                "capacity and width"
            ) from e
    return dataclasses.replace(first, layers=tuple(layers), length=concat_sequences(None, [c.length for c in caches]))


def per_row(x: int | Sequence[int], cache: Cache, name: str) -> np.ndarray:
    """A number for all rows of a cache, or one for each, as i64[B]."""
    B, given = cache.length.shape[0], np.asarray(x)
    if given.shape not in ((), (B,)) or not np.issubdtype(given.dtype, np.integer):
        raise KvjaxError(f"{name} must be a whole number, or one for each of {B} rows, got {x!r}")
    return np.broadcast_to(given, (B,)).astype(np.int64)


def held_tokens(cache: Cache) -> np.ndarray:
    """i64[B]: tokens that each row has seen."""
    return np.asarray(jax.device_get(cache.length)).astype(np.int64)


def mesh_of(cache: Cache) -> Mesh | None:
    """The mesh that a cache lies on."""
    sharding = cache.length.sharding
    return cast(Mesh, sharding.mesh) if isinstance(sharding, NamedSharding) else None
