"""Sequences of a cache: taken out of a layer's state, or joined; every array has B first, or 1 if all share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.protocol import BatchedLayer, BoundLayer, LayerState
from kvjax.cache.uses import CONTEXT_REMEDY
from kvjax.core import memory
from kvjax.core.types import Array
from kvjax.errors import IncompatibleMethod


def missing_ability(layer: BoundLayer, ability: str) -> IncompatibleMethod:
    """Makes the error for a layer without an optional ability."""
    return IncompatibleMethod(f"{type(layer).__name__} does not say how its cache could {ability}; {CONTEXT_REMEDY}")


def take_sequences(layer: BoundLayer | None, state: Any, which: Array | np.ndarray) -> Any:
    """Takes the sequences `which` i32[n] of a state, each as often as it is named."""
    if isinstance(layer, BatchedLayer):
        return layer.take_sequences(state, which)
    batch = _batch_size(state)

    def take(x: Array) -> Array:
        # What all sequences share, such as a calibrated basis, has one entry and stays as it is.
        return memory.apply_on_device(lambda a: a[which], x) if x.ndim and x.shape[0] == batch else x

    return jax.tree.map(take, state)


def concat_sequences(layer: BoundLayer | None, states: list[Any]) -> Any:
    """Concatenates the sequences of several states; raises ValueError where shapes differ."""
    if isinstance(layer, BatchedLayer):
        return layer.concat_sequences(states)

    if all(isinstance(state, LayerState) for state in states):
        states = pad_to_largest(states)
    batches = [_batch_size(state) for state in states]

    def concat_on_device(*xs: Array) -> Array:
        if len({(x.shape[1:], x.dtype) for x in xs}) > 1:
            raise ValueError(f"arrays of {' and '.join(str(x.shape[1:]) for x in xs)} per sequence")
        # One sequence and what all sequences share look alike. So a shared array may come with an entry per sequence,
        # from a state of one sequence that was forked, and then all get one.
        return jnp.concatenate([jnp.broadcast_to(x, (n, *x.shape[1:])) for x, n in zip(xs, batches, strict=True)])

    def concat(*xs: Array) -> Array:
        is_shared = xs[0].ndim == 0 or (max(batches) > 1 and all(x.shape[0] == 1 for x in xs))
        return xs[0] if is_shared else memory.apply_on_device(concat_on_device, *xs)

    return jax.tree.map(concat, *states)


def pad_to_largest(states: Sequence[Any]) -> list[Any]:
    """Gives states of one layer under a `kvjax.Method` equal shapes: empty slots, pages and chunks follow the others.

    The states are of one capacity. What a prompt leaves and the headroom behind it add up to different numbers of slots
    where a method evicts, and a budget of the whole model gives a layer as many as its prompt asks for.

    Raises:
      ValueError: states of different parts or with different numbers of heads.
    """
    leaves, trees = zip(*map(jax.tree.flatten, states), strict=True)
    if len(set(trees)) == 1 and len({tuple(x.shape[1:] for x in xs) for xs in leaves}) == 1:
        return list(states)
    if len({len(xs) for xs in leaves}) > 1:
        raise ValueError("some of them have parts that others lack")
    shapes = [tuple(map(max, zip(*(x.shape[2:] for x in xs), strict=True))) for xs in zip(*leaves, strict=True)]
    # Static fields, such as the slots that a codec counts, are those of the state with the most.
    tree = trees[int(np.argmax([sum(x.size // max(x.shape[0], 1) for x in xs if x.ndim) for xs in leaves]))]

    def pad(x: Array, shape: tuple[int, ...]) -> Array:
        if x.shape[2:] == shape:
            return x
        # Numbers lie in the order of their slots, chunks or pages, in a ring with as many places as there are slots
        # too, so that those behind the last one are free. An i32 is a position, a head or a slot, and -1 is none.
        more = [(0, 0), (0, 0), *((0, n - m) for n, m in zip(shape, x.shape[2:], strict=True))]
        return memory.apply_on_device(lambda a: jnp.pad(a, more, constant_values=-1 if a.dtype == jnp.int32 else 0), x)

    return [tree.unflatten(map(pad, xs, shapes)) for xs in leaves]


def _batch_size(state: Any) -> int:
    return max((x.shape[0] for x in jax.tree.leaves(state) if x.ndim), default=1)
