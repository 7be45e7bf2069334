"""Operations on the sequences of a cache: crop, take, fork and join."""

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
from kvjax.utils.keywords import checks_keywords


@checks_keywords
def crop(cache: Cache, lengths: int | Sequence[int]) -> Cache:
    """Keeps only the first tokens of each sequence, exactly: as if the others had never been fed.

    Args:
      cache: of any method that can give tokens back.
      lengths: tokens that each sequence keeps, one number or one per sequence.

    Returns:
      A new cache; the given one stays usable.

    Raises:
      IncompatibleMethod: a method that has evicted some of the tokens, or has coded them in groups for good.
    """
    cache.check_usable()
    new_lengths, old_lengths = per_sequence(lengths, cache, "lengths"), sequence_lengths(cache)
    for row, (new, old) in enumerate(zip(new_lengths, old_lengths, strict=True)):
        if not 0 <= new <= old:
            raise KvjaxError(f"sequence {row} has {old} tokens and cannot be cropped to {new}; give 0..{old}")
    count = old_lengths - new_lengths
    for i, (layer, state) in enumerate(zip(cache.plan, cache.layers, strict=True)):
        if not isinstance(layer, RewindableLayer):
            raise missing_ability(layer, "give back tokens")
        max_rollback = np.asarray(layer.max_rollback(state))
        for row in np.flatnonzero(count > max_rollback)[:1]:
            raise IncompatibleMethod(
                f"sequence {row} of layer {i} cannot give back its last {count[row]} tokens, {max_rollback[row]} at "
                f"most: those before lie in groups that are coded for good, or in a shared prefix; crop to "
                f"{old_lengths[row] - max_rollback[row]} tokens or more; {CONTEXT_REMEDY}"
            )
    count = jnp.asarray(count, jnp.int32)
    layers = crop_layers(cache.layers, count, plan=cache.plan, heads=cache.config.kv_heads, mesh=mesh_of(cache))
    return dataclasses.replace(cache, layers=layers, length=cache.length - count)


@functools.partial(jax.jit, static_argnames=("plan", "heads", "mesh"))
def crop_layers(
    layers: tuple[Any, ...], count: Array, plan: tuple[BoundLayer, ...], heads: int, mesh: Mesh | None
) -> tuple:
    """Removes the last count i32[B] tokens of each sequence, at most `max_rollback`, from the states of all layers."""
    states = []
    for layer, state in zip(plan, layers, strict=True):
        if not isinstance(layer, RewindableLayer):
            raise missing_ability(layer, "give back tokens")
        states.append(per_device(layer.crop, count.shape[0], heads, mesh)(state, count))
    return tuple(states)


@checks_keywords
def take(cache: Cache, which: Sequence[int]) -> Cache:
    """Takes the sequences with these indices, in this order, each as often as it is listed; any method, bit by bit."""
    cache.check_usable()
    indices = np.asarray(which)
    B = cache.length.shape[0]
    if indices.ndim != 1 or not indices.size or not np.issubdtype(indices.dtype, np.integer):
        raise KvjaxError(f"sequences are named by a list of one number or more, got {which!r}")
    if indices.min() < 0 or indices.max() >= B:
        raise KvjaxError(f"the cache has sequences 0..{B - 1}, got {which!r}")
    mesh = mesh_of(cache)
    if mesh is not None:
        check_divides("B", len(indices), mesh, "take a number of sequences that does")
    at = jnp.asarray(indices, jnp.int32)
    layers = tuple(take_sequences(layer, state, at) for layer, state in zip(cache.plan, cache.layers, strict=True))
    return dataclasses.replace(cache, layers=layers, length=take_sequences(None, cache.length, at))


@checks_keywords
def fork(cache: Cache, times: int) -> Cache:
    """Copies each sequence `times` times; the copies of a sequence are adjacent."""
    return take(cache, np.repeat(np.arange(cache.length.shape[0]), arguments.integer("times", times)).tolist())


@checks_keywords
def join(caches: Sequence[Cache]) -> Cache:
    """Joins the sequences of several caches of one method, model and capacity into one batch, bit by bit.

    Documents may be of any lengths. Where that gives the caches different numbers of slots, those of fewer get empty
    ones, which count as reserved bytes.

    Raises:
      KvjaxError: caches of different models, methods or capacities, or of a layer of one's own whose arrays differ.
    """
    if not caches:
        raise KvjaxError("no caches were given; pass one or more")
    for cache in caches:
        cache.check_usable()
    # Padding a cache to another capacity would change what its method has stored: a policy with more slots evicts less.
    first = caches[0]
    for i, cache in enumerate(caches[1:], 1):
        if cache.weights != first.weights:
            raise OtherWeights(
                f"cache {i} is of a model with other weights than cache 0, or one of them names none, as those of "
                "kvjax.functional; join those of one model"
            )
        if cache.config != first.config or cache.plan != first.plan:
            raise KvjaxError(f"cache {i} is of another model or method than cache 0; join those of one")
        if cache.capacity != first.capacity:
            raise KvjaxError(
                f"cache {i} has room for {cache.capacity} tokens per sequence and cache 0 for {first.capacity}; read "
                "their documents with one capacity"
            )
    layers = []
    for i, layer in enumerate(first.plan):
        try:
            layers.append(concat_sequences(layer, [cache.layers[i] for cache in caches]))
        except ValueError as e:
            raise KvjaxError(
                f"layer {i} of these caches, {type(layer).__name__}, is held in unlike shapes ({e}); read their "
                "documents in one batch"
            ) from e
    return dataclasses.replace(first, layers=tuple(layers), length=concat_sequences(None, [c.length for c in caches]))


def per_sequence(x: int | Sequence[int], cache: Cache, name: str) -> np.ndarray:
    """Broadcasts a number for all sequences of a cache, or one for each, to i64[B]."""
    B, values = cache.length.shape[0], np.asarray(x)
    if values.shape not in ((), (B,)) or not np.issubdtype(values.dtype, np.integer):
        raise KvjaxError(f"{name} must be a whole number, or one for each of {B} sequences, got {x!r}")
    return np.broadcast_to(values, (B,)).astype(np.int64)


def sequence_lengths(cache: Cache) -> np.ndarray:
    """Returns the tokens of each sequence, evicted ones included, as i64[B]."""
    return np.asarray(jax.device_get(cache.length)).astype(np.int64)


def mesh_of(cache: Cache) -> Mesh | None:
    """Returns the mesh that a cache is sharded over."""
    sharding = cache.length.sharding
    return cast(Mesh, sharding.mesh) if isinstance(sharding, NamedSharding) else None
