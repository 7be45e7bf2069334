"""Meshes with `Explicit` axes, those of `jax.make_mesh`: on them, shardings are a part of the types of arrays.

There an operation has to name the sharding of a result that JAX cannot derive, and kvjax names none. A function that is
decorated by `accepts_explicit_axes` sees `Auto` axes, which the compiler divides, and its results have types again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.core.mesh import axes_of_layer_array
from kvjax.utils.mesh_context import outside_callers_mesh

P = ParamSpec("P")
R = TypeVar("R")


def accepts_explicit_axes(
    result_specs: Callable[..., Any], own_mesh: Callable[..., Mesh | None] = lambda *args, **kwargs: None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that is called with arrays on a mesh of `Explicit` axes, or within such a mesh.

    Args:
      result_specs: (result, *args, **kwargs) -> the result with a `PartitionSpec` in place of each array, which may
        name an axis twice, or one that does not divide the array: those are left out.
      own_mesh: (*args, **kwargs) -> the mesh of the results where no argument lies on one.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        run_auto: Callable[..., R] = call  # the arguments are made anew, which a ParamSpec cannot say

        @functools.wraps(call)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with outside_callers_mesh():
                mesh = _find_mesh((args, kwargs), own_mesh(*args, **kwargs))
                if mesh is None:
                    return call(*args, **kwargs)
                if isinstance(mesh, AbstractMesh):
                    auto = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
                    with jax.sharding.use_abstract_mesh(auto):
                        auto_args, auto_kwargs = jax.tree.map(_leave_types, (args, kwargs))
                        result = run_auto(*auto_args, **auto_kwargs)
                else:
                    auto_args, auto_kwargs = leave_explicit_mesh((args, kwargs))
                    result = run_auto(*auto_args, **auto_kwargs)
                specs = result_specs(result, *args, **kwargs)
                return jax.tree.map(functools.partial(_enter_types, mesh=mesh), result, specs)

        return run

    return decorate


def spec_of(x: Any) -> PartitionSpec:
    """Returns how each axis of an array is divided; not at all, for an array on no mesh and for no array."""
    sharding = jax.typeof(x).sharding if isinstance(x, Tracer) else getattr(x, "sharding", None)
    names = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    return PartitionSpec(*names, *[None] * (getattr(x, "ndim", 0) - len(names)))


def specs_as_before(result: Any, before: Any, *_: Any, **__: Any) -> Any:
    """Returns the specs of a value that lies as the one before it does, so that it is a carry of a caller's loop."""
    return jax.tree.map(lambda _, x: spec_of(x), result, before)


def layer_specs(state: Any, num_sequences: int, num_heads: int, sequences: Any, heads: Any) -> Any:
    """Returns the specs of a layer's arrays, by the mesh axes along which its sequences and its heads lie."""
    names = {"B": sequences, "K": heads}

    def spec(x: Any) -> PartitionSpec:
        return PartitionSpec(*map(names.get, axes_of_layer_array(x.shape, num_sequences, num_heads).split()))

    return jax.tree.map(spec, state)


def leave_explicit_mesh(values: Any) -> Any:
    """Returns arrays with `Auto` axes in place of `Explicit` ones, on the same devices; nothing is copied."""
    return jax.tree.map(_leave_mesh, values)


def _find_mesh(values: Any, own: Mesh | None) -> Mesh | AbstractMesh | None:
    """Finds a mesh with `Explicit` axes: within a trace an abstract one, as there arrays have types alone."""
    arrays = [x for x in jax.tree.leaves(values) if isinstance(x, jax.Array)]
    in_use = jax.sharding.get_abstract_mesh()
    if not in_use.empty or any(isinstance(x, Tracer) for x in arrays):
        meshes = [in_use, *(jax.typeof(x).sharding.mesh for x in arrays)]
    else:
        meshes = [*(x.sharding.mesh for x in arrays if isinstance(x.sharding, NamedSharding)), own]
    return next((mesh for mesh in meshes if mesh is not None and mesh.explicit_axes), None)


def _leave_types(x: Any) -> Any:
    """Takes an array of a trace into the mesh that is in use, whose axes are `Auto`."""
    # An array on no mesh enters too, for its gradient to leave again. Known values stay known.
    if not isinstance(x, jax.Array) or not (isinstance(x, Tracer) or jax.typeof(x).sharding.mesh.explicit_axes):
        return x
    return jax.sharding.reshard(x, PartitionSpec())


def _leave_mesh(x: Any) -> Any:
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not isinstance(x.sharding, NamedSharding):
        return x
    mesh = x.sharding.mesh
    if not isinstance(mesh, Mesh) or not mesh.explicit_axes:
        return x
    sharding = NamedSharding(Mesh(mesh.devices, mesh.axis_names), x.sharding.spec, memory_kind=x.sharding.memory_kind)
    return jax.device_put(x, sharding)


def _enter_types(x: Any, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> Any:
    """Returns an array whose type says how it is divided over a mesh."""
    if not isinstance(x, jax.Array):
        return x
    names: list[Any] = []
    used: set[str] = set()
    for size, name in zip(x.shape, spec, strict=False):
        axes = {name} if isinstance(name, str) else set(name or ())
        is_divided = used.isdisjoint(axes) and size % math.prod(mesh.shape[axis] for axis in axes) == 0
        names.append(name if is_divided else None)
        used |= axes if is_divided else set()
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*names)))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names), memory_kind=x.sharding.memory_kind))
