"""Devices: the only file that knows how arrays are spread over them.

Batch rows lie along the mesh axis `data`, key/value heads, MLP width and vocabulary along `model`. A method never sees
a mesh axis: its arrays hold the rows and heads of one device, and what concerns all heads of a layer goes through
`over_heads`.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.core.types import Array

RULES = {"B": "data", "K": "model", "F": "model", "V": "model"}
"""Axis letter -> mesh axis."""

_heads_axis: contextvars.ContextVar[str | None] = contextvars.ContextVar("heads_axis", default=None)


def spec(axes: str, mesh: Mesh) -> PartitionSpec:
    """Axis letters -> partition spec on a mesh; a mesh without the named axis leaves the letter unsharded."""
    named = [RULES.get(a) for a in axes.split()]
    return PartitionSpec(*(a if a in mesh.axis_names else None for a in named))


def named(axes: str, mesh: Mesh) -> NamedSharding:
    """Axis letters -> sharding on a mesh."""
    return NamedSharding(mesh, spec(axes, mesh))


def constrain(x: Array, axes: str, mesh: Mesh | None) -> Array:
    """Inside jit: x laid out by its axis letters; without a mesh, x."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, named(axes, mesh))


@contextlib.contextmanager
def heads_along(axis: str | None) -> Iterator[None]:
    """While a layer is traced: its key/value heads are spread along this mesh axis."""
    token = _heads_axis.set(axis)
    try:
        yield
    finally:
        _heads_axis.reset(token)


class over_heads:  # noqa: N801 (reads as a phrase: over_heads.sum)
    """What concerns all key/value heads of a layer, wherever they are: x [B K ...] -> [B 1 ...]."""

    @staticmethod
    def sum(x: Array) -> Array:
        """The sum over all heads."""
        axis, here = _heads_axis.get(), x.sum(1, keepdims=True, dtype=x.dtype)
        return here if axis is None else lax.psum(here, axis)

    @staticmethod
    def mean(x: Array) -> Array:
        """The mean over all heads."""
        axis, here = _heads_axis.get(), x.mean(1, keepdims=True)
        return here if axis is None else lax.pmean(here, axis)

    @staticmethod
    def any(x: Array) -> Array:
        """Whether it holds for any head, bool."""
        axis, here = _heads_axis.get(), x.any(1, keepdims=True)
        return here if axis is None else lax.pmax(here.astype("int32"), axis) > 0

    @staticmethod
    def gather(x: Array) -> Array:
        """The rows of all heads, [B K ...] with the K of the whole layer."""
        axis = _heads_axis.get()
        return x if axis is None else lax.all_gather(x, axis, axis=1, tiled=True)

    @staticmethod
    def first(here: int) -> Array | int:
        """Which head of the layer is the first of the `here` heads on this device."""
        axis = _heads_axis.get()
        return 0 if axis is None else lax.axis_index(axis) * here
