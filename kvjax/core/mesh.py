"""Device meshes; no other module knows how arrays are spread over devices.

Sequences lie along the mesh axis `data`; key/value heads, MLP width and vocabulary lie along `model`. A method never
sees a mesh axis: `per_device` gives it the sequences and heads of one device, and what concerns all heads of a layer
goes through `over_heads`.
"""

from __future__ import annotations

import contextvars
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Int32, Shaped

from kvjax.core import memory
from kvjax.core.types import Array
from kvjax.errors import KvjaxError

RULES = {"B": "data", "K": "model", "F": "model", "V": "model"}
"""Axis letter -> mesh axis."""
# Megatron's division: a layer then sums over devices twice, after attention's output projection and after the MLP. Head
# dim and slots stay whole, so that no codec's group and no ranking of tokens crosses devices.

# The mesh axis along which the key/value heads lie, while `per_device` traces a layer; `over_heads` reads it.
_heads_axis: contextvars.ContextVar[str | None] = contextvars.ContextVar("heads_axis", default=None)


def foreign_axes(mesh: Mesh) -> list[str]:
    """Returns the axes of several devices along which kvjax divides nothing, since they have other names."""
    return [name for name, size in mesh.shape.items() if name not in RULES.values() and size > 1]


def auto_mesh(mesh: Mesh, other_remedy: str = "") -> Mesh:
    """Returns a caller's mesh as kvjax computes on it: the same devices and names, and all axes `AxisType.Auto`.

    Since JAX 0.9 the axes of `jax.make_mesh` are `Explicit`: shardings are then types, and many operations ask for that
    of their result. kvjax names none; its compiler divides what `per_device` and `constrain` leave open.

    Raises:
      KvjaxError: a mesh with devices that would divide nothing, since their axis has another name; its text ends with
        `other_remedy`.
    """
    # Programs are compiled for machines that are not there on abstract meshes, which have no devices.
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise KvjaxError(f'mesh is a jax.sharding.Mesh with the axes "data" and "model", got {mesh!r:.80}')
    if unknown := foreign_axes(mesh):
        sizes = tuple(mesh.shape.values())
        sizes_of_two = (sizes[0], math.prod(sizes[1:])) if len(sizes) > 1 else (1, *sizes)
        devices = "mesh.devices" if sizes == sizes_of_two else f"mesh.devices.reshape{sizes_of_two}"
        raise KvjaxError(
            f"nothing is divided over the mesh axis {unknown[0]!r} of {mesh.shape[unknown[0]]} devices: sequences lie "
            f'along an axis "data", and key/value heads, MLP width and vocabulary along "model"; give '
            f'mesh=Mesh({devices}, ("data", "model")){other_remedy}'
        )
    return Mesh(mesh.devices, mesh.axis_names) if isinstance(mesh, Mesh) else mesh


def spec(axes: str, mesh: Mesh) -> PartitionSpec:
    """Axis letters -> partition spec; a mesh that lacks a letter's axis leaves it unsharded."""
    mesh_axes = [RULES.get(a) for a in axes.split()]
    return PartitionSpec(*(a if a in mesh.axis_names else None for a in mesh_axes))


def named_sharding(axes: str, mesh: Mesh) -> NamedSharding:
    """Axis letters -> sharding on a mesh."""
    return NamedSharding(mesh, spec(axes, mesh))


def make_mesh(batch: int, heads: int) -> Mesh:
    """Makes a mesh of devices of all processes, which divides sequences by `batch` and key/value heads by `heads`.

    Raises:
      KvjaxError: more devices than there are, or a mesh that leaves out devices of one of several processes.
    """
    devices, num_asked = jax.devices(), batch * heads
    has_others = len({device.process_index for device in devices}) > 1
    if num_asked > len(devices) or (has_others and num_asked < len(devices)):
        fitting = " or ".join(f"{n}x{len(devices) // n}" for n in range(1, len(devices) + 1) if len(devices) % n == 0)
        of_all = " of all processes" if has_others else ""
        raise KvjaxError(
            f"the mesh {batch}x{heads} (batch x heads) asks for {num_asked} devices and there are {len(devices)}"
            f"{of_all}; take {fitting}, or give JAX more devices (JAX_NUM_CPU_DEVICES={num_asked} on a CPU)"
        )
    # Neighbors on the mesh are neighbors in a TPU's network.
    return Mesh(mesh_utils.create_device_mesh((batch, heads), devices[:num_asked]), (RULES["B"], RULES["K"]))


def parse_mesh(text: str) -> tuple[int, int]:
    """Reads a mesh's shape, "2x4" or "batch=2,heads=4", where what is left out is 1; raises KvjaxError for another."""
    sizes = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    batch, heads = map(int, sizes.groups()) if sizes else (1, 1)
    if not sizes:
        named = dict(re.findall(r"(batch|heads)=(\d{1,6})(?:,|$)", text))
        if not named or ",".join(f"{name}={size}" for name, size in named.items()) != text:
            batch = 0
        batch, heads = batch and int(named.get("batch", 1)), int(named.get("heads", 1))
    if not batch or not heads:
        raise KvjaxError(f"{text!r:.60} is no mesh: write batch x heads, as 2x4, or by name, as batch=2,heads=4")
    return batch, heads


def is_shared(mesh: Mesh | None) -> bool:
    """Whether a mesh has devices of several processes."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def put(x: np.ndarray, sharding: NamedSharding) -> Array:
    """Places a value that all processes have, each its own shards."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    # `jax.device_put` would compare the value in all processes first, by a collective.
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def constrain(x: Array, axes: str, mesh: Mesh | None) -> Array:
    """Constrains the sharding of x inside jit, by its axis letters; without a mesh, returns x."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, named_sharding(axes, mesh))


def check_divides(letter: str, size: int, mesh: Mesh, remedy: str) -> None:
    """Raises KvjaxError if an axis of this letter and size does not divide equally over the mesh."""
    num_devices = mesh.shape.get(RULES[letter], 1) if letter in RULES else 1
    if size % num_devices:
        raise KvjaxError(
            f"axis {letter} of size {size} does not divide over the {num_devices} devices of mesh axis "
            f"{RULES[letter]!r}, {'batch' if letter == 'B' else 'heads'} of the mesh; {remedy}"
        )


def axes_of_layer_array(shape: tuple[int, ...], num_sequences: int, num_heads: int) -> str:
    """Finds the axis letters of one array of a layer's state from its shape, by the rule of `kvjax.cache.protocol`.

    Raises:
      KvjaxError: if the shape does not follow the rule.
    """
    if not shape:
        return ""
    # A size of 1 is read as shared only where the batch itself is not 1: for one sequence both mean the same.
    rank, is_shared = len(shape), shape[0] == 1 != num_sequences
    has_heads = rank >= 3 and shape[1] == num_heads
    if (shape[0] != num_sequences and not is_shared) or (rank >= 3 and not has_heads and shape[1] != 1):
        raise KvjaxError(
            f"an array of a layer has shape {shape}, and a mesh cannot tell what belongs to which device: its axes "
            f"must be the batch's {num_sequences} sequences, or 1 for what all of them share, and then, where there "
            f"are more than two, the layer's {num_heads} key/value heads, or 1 for what all heads share"
        )
    return ("1" if is_shared else "B") + (" K" if has_heads else "")


def per_device(fun: Callable[..., Any], num_sequences: int, num_heads: int, mesh: Mesh | None) -> Callable[..., Any]:
    """Wraps a function of a layer's arrays so that each device runs it on its own sequences and heads.

    Arguments and results are divided as `axes_of_layer_array` says; arrays in host memory stay there. `num_sequences`
    and `num_heads` are those of the whole layer. Without a mesh, returns `fun` itself.
    """
    if mesh is None:
        return fun

    def partition(x: Any) -> PartitionSpec:
        return spec(axes_of_layer_array(x.shape, num_sequences, num_heads), mesh)

    def run_locally(*args: Any) -> list[Array]:
        # Set while the function is traced, and not passed: methods would have to hand it through to every reduction.
        token = _heads_axis.set(RULES["K"] if RULES["K"] in mesh.axis_names else None)
        try:
            return [x for x in jax.tree.leaves(fun(*args)) if x.size]
        finally:
            _heads_axis.reset(token)

    def run(*args: Any) -> Any:
        # Traced once as one device would run all of it, for the shapes of the results.
        traced, results = jax.make_jaxpr(fun, return_shape=True)(*args)
        types = traced.out_avals  # unlike `results`, these tell the memory kind
        in_specs, out_specs = jax.tree.map(partition, args), [partition(x) for x in types if x.size]
        # By the rule, an array that each device holds whole is equal on all; JAX's own check fails on host memory.
        sharded = jax.shard_map(run_locally, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        # A result without elements makes the compiler of JAX 0.11.2 end the process, so those are made outside.
        non_empty, leaves = iter(sharded(*args)), []
        for x in types:
            if x.size:
                leaves.append(next(non_empty))
            else:
                sharding = NamedSharding(mesh, partition(x), memory_kind="pinned_host" if memory.is_host(x) else None)
                leaves.append(jax.device_put(jnp.zeros(x.shape, x.dtype), sharding))
        return jax.tree.unflatten(jax.tree.structure(results), leaves)

    return run


def vary(constants: Any) -> Any:
    """Marks constants as varying between devices, to start a loop's carry inside a caller's `jax.shard_map`.

    JAX takes a constant to be equal on all devices, and a carry must have one type in all iterations.
    """

    def vary_along(x: Array, axis: str) -> Array:
        try:
            return lax.pcast(x, axis, to="varying")
        except ValueError:  # it varies already
            return x

    for axis in jax.sharding.get_abstract_mesh().manual_axes:
        constants = jax.tree.map(functools.partial(vary_along, axis=axis), constants)
    return constants


def to_numpy(x: Any) -> np.ndarray:
    """Returns the value of an array, which may lie on devices of several processes.

    It is the only way from devices to the host outside `core`. An array that no process has whole is gathered, and a
    gathering is a collective: all processes call this in one order, so never under `if process_index() == 0`, in a
    `repr`, or where an exception is handled. Arrays of one process and replicated ones are read without one.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental import multihost_utils  # imported late, as a single process needs none of it

    if memory.is_host(x):
        x = jax.device_put(x, x.sharding.with_memory_kind("device"))
    return multihost_utils.process_allgather(x, tiled=True)


class over_heads:  # noqa: N801 (reads as a phrase: over_heads.sum)
    """Reductions over all key/value heads of a layer, on whichever devices they are: x [B K ...] -> [B 1 ...]."""

    @staticmethod
    def sum(x: Shaped[Array, "B K *rest"]) -> Shaped[Array, "B 1 *rest"]:
        """The sum over all heads."""
        # `dtype`, because `jnp.sum` widens small integers.
        axis, local = _heads_axis.get(), x.sum(1, keepdims=True, dtype=x.dtype)
        return local if axis is None else lax.psum(local, axis)

    @staticmethod
    def mean(x: Shaped[Array, "B K *rest"]) -> Shaped[Array, "B 1 *rest"]:
        """The mean over all heads."""
        axis, local = _heads_axis.get(), x.mean(1, keepdims=True)
        return local if axis is None else lax.pmean(local, axis)

    @staticmethod
    def max(x: Shaped[Array, "B K *rest"]) -> Shaped[Array, "B 1 *rest"]:
        """The maximum over all heads."""
        axis, local = _heads_axis.get(), x.max(1, keepdims=True)
        return local if axis is None else lax.pmax(local, axis)

    @staticmethod
    def any(x: Bool[Array, "B K *rest"]) -> Bool[Array, "B 1 *rest"]:
        """Whether x holds for any head."""
        # Reductions between devices take numbers only.
        axis, local = _heads_axis.get(), x.any(1, keepdims=True)
        return local if axis is None else lax.pmax(local.astype("int32"), axis) > 0

    @staticmethod
    def gather(x: Shaped[Array, "B local *rest"]) -> Shaped[Array, "B K *rest"]:
        """The arrays of all heads, with the K of the whole layer."""
        axis = _heads_axis.get()
        return x if axis is None else lax.all_gather(x, axis, axis=1, tiled=True)

    @staticmethod
    def local_part(x: Shaped[Array, "K *rest"], num_local: int) -> Shaped[Array, "local *rest"]:
        """The part of x, given for all heads of the layer, that belongs to this device's `num_local` heads."""
        return lax.dynamic_slice_in_dim(x, over_heads.first_head(num_local), num_local, 0)

    @staticmethod
    def first_head(num_local: int) -> Int32[Array, ""] | int:
        """The index in the layer of the first of this device's `num_local` heads."""
        axis = _heads_axis.get()
        return 0 if axis is None else lax.axis_index(axis) * num_local
