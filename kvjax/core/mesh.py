"""Devices: the only file that knows how arrays are spread over them.

Batch rows lie along the mesh axis `data`, key/value heads, MLP width and vocabulary along `model`. A method never sees
a mesh axis: `per_device` hands it the rows and heads of one device, and what concerns all heads of a layer goes through
`over_heads`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.core import memory
from kvjax.core.types import Array
from kvjax.errors import KvjaxError

RULES = {"B": "data", "K": "model", "F": "model", "V": "model"}
"""Axis letter -> mesh axis."""

_heads_axis: contextvars.ContextVar[str | None] = contextvars.ContextVar("heads_axis", default=None)


def spec(axes: str, mesh: Mesh) -> PartitionSpec:
    """Axis letters -> partition spec on a mesh; a mesh without the named axis leaves the letter unsharded."""
    named = [RULES.get(a) for a in axes.split()]
    return PartitionSpec(*(a if a in mesh.axis_names else None for a in named))


def named_sharding(axes: str, mesh: Mesh) -> NamedSharding:
    """Axis letters -> sharding on a mesh."""
    return NamedSharding(mesh, spec(axes, mesh))


def constrain(x: Array, axes: str, mesh: Mesh | None) -> Array:
    """Inside jit: x laid out by its axis letters; without a mesh, x."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, named_sharding(axes, mesh))


def check_divides(letter: str, size: int, mesh: Mesh, remedy: str) -> None:
    """Raises KvjaxError where devices cannot have equal parts of an axis of this letter and size."""
    ways = mesh.shape.get(RULES[letter], 1) if letter in RULES else 1
    if size % ways:
        raise KvjaxError(
            f"axis {letter} of size {size} does not divide over the {ways} devices of mesh axis {RULES[letter]!r}; "
            f"{remedy}"
        )


def axes_of_layer_array(shape: tuple[int, ...], rows: int, heads: int) -> str:
    """The axis letters of one array of a layer with so many rows and key/value heads, from its shape alone.

    The rule stands in `kvjax.cache.protocol`. Raises KvjaxError for a shape that cannot follow it.
    """
    if not shape:
        return ""
    rank, shared = len(shape), shape[0] == 1 != rows
    divided = rank >= 3 and shape[1] == heads
    if (shape[0] != rows and not shared) or (rank >= 3 and not divided and shape[1] != 1):
        raise KvjaxError(
            f"an array of a layer has shape {shape}, of which a mesh cannot tell what belongs to which device: its "
            f"axes must be the batch's {rows} rows, or 1 for what all rows share, and then, where there are more than "
            f"two, the layer's {heads} key/value heads, or 1 for what all heads share"
        )
    return ("1" if shared else "B") + (" K" if divided else "")


def per_device(fun: Callable[..., Any], rows: int, heads: int, mesh: Mesh | None) -> Callable[..., Any]:
    """`fun` of a layer's arrays, run by each device on its own rows and heads; without a mesh, `fun` itself.

    Which axes of arguments and results are divided says `axes_of_layer_array`. Arrays in host memory stay there, each
    device's part in its own. Shapes of results are found by tracing `fun` as one device would run it.
    """
    if mesh is None:
        return fun

    def spread(x: Any) -> PartitionSpec:
        return spec(axes_of_layer_array(x.shape, rows, heads), mesh)

    def here(*args: Any) -> Any:
        with heads_along(RULES["K"] if RULES["K"] in mesh.axis_names else None):
            return fun(*args)

    def elements_here(*args: Any) -> list[Array]:
        return [x for x in jax.tree.leaves(here(*args)) if x.size]

    def empty(x: Any) -> Array:
        place = NamedSharding(mesh, spread(x), memory_kind="pinned_host" if memory.is_host(x) else None)
        return jax.device_put(jnp.zeros(x.shape, x.dtype), place)

    def run(*args: Any) -> Any:
        traced, results = jax.make_jaxpr(fun, return_shape=True)(*args)
        tree, types = jax.tree.structure(results), traced.out_avals  # which know the memory, as `results` does not
        places = jax.tree.map(spread, args), [spread(x) for x in types if x.size]
        # What is whole on several devices is equal there by the rule above; JAX's own check knows no host memory.
        divided = jax.shard_map(elements_here, mesh=mesh, in_specs=places[0], out_specs=places[1], check_vma=False)
        # A result without elements makes the compiler of JAX 0.11.2 end the process: such ones are made out here.
        found = iter(divided(*args))
        made = [next(found) if x.size else empty(x) for x in types]
        return jax.tree.unflatten(tree, made)

    return run


def vary(constants: Any) -> Any:
    """Constants that may differ between devices, so that a loop can begin with them inside a caller's `jax.shard_map`.

    JAX holds a constant to be equal on all devices, and wants the carry of a loop to be of one type in all rounds.
    """
    for axis in jax.sharding.get_abstract_mesh().manual_axes:
        constants = jax.tree.map(functools.partial(_vary_along, axis=axis), constants)
    return constants


def _vary_along(x: Array, axis: str) -> Array:
    try:
        return lax.pcast(x, axis, to="varying")
    except ValueError:  # it varies already
        return x


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
    def max(x: Array) -> Array:
        """The greatest over all heads."""
        axis, here = _heads_axis.get(), x.max(1, keepdims=True)
        return here if axis is None else lax.pmax(here, axis)

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
    def local_part(x: Array, here: int) -> Array:
        """Of what stands for all heads of the layer, x [K ...], the part of the `here` heads on this device."""
        return lax.dynamic_slice_in_dim(x, over_heads.first_head(here), here, 0)

    @staticmethod
    def first_head(here: int) -> Array | int:
        """Which head of the layer is the first of the `here` heads on this device."""
        axis = _heads_axis.get()
        return 0 if axis is None else lax.axis_index(axis) * here
