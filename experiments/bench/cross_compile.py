"""Compiles programs for accelerators that this machine lacks: a TPU topology, such as "v5e:2x2", or a GPU, "h200".

Compiled programs can be read, not run. A TPU needs the extra `aot`, which is the package libtpu, or `make aot`, which
keeps that package apart. A GPU needs the extra `gpu`, JAX >= 0.11.2, and JAX_PLATFORMS=cpu on a machine without one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jaxlib
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from kvjax import KvjaxError
from kvjax.core import memory
from kvjax.generation.programs import jit_loop

GPUS = {"h200": ("NVIDIA H200", 132)}  # (name, multiprocessors) of each NAME.textproto in this folder
# libtpu must not query a TPU's metadata server, nor lock a TPU that no process can hold.
TPU_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

# `make aot` and `make test` install libtpu here and not as a package: on a machine without a TPU, JAX would print a
# page of warnings and wait for seconds in every process.
LIBTPU = Path(sys.prefix, "libtpu", "libtpu", "libtpu.so")


@functools.cache
def open_topology(topology: str) -> tuple[Any, ...]:
    """Returns the devices of another machine: `h200` has one, `h200:8` eight, a TPU as many as its name says.

    Raises:
      KvjaxError: if JAX cannot describe that machine here.
    """
    name, _, count = topology.partition(":")
    try:
        if name in GPUS:
            config = Path(__file__).with_name(f"{name}.textproto").read_text()
            # Without a GPU no driver answers for its registers, caches and clocks; a file has them.
            described = topologies.get_topology_desc("", "cuda", target_config=config, topology=f"1x1x{count or 1}")
        else:
            os.environ |= TPU_ENVIRONMENT
            if LIBTPU.exists():
                os.environ.setdefault("TPU_LIBRARY_PATH", str(LIBTPU))
            described = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    except Exception as e:  # its type depends on the missing package
        remedy = 'pip install "kvjax[aot]", set JAX_PLATFORMS=cpu, and give a TPU as in v5e:2x4'
        if name in GPUS:
            remedy = (
                'pip install "jax[cuda13]>=0.11.2" (Python >= 3.12), set JAX_PLATFORMS=cpu, and write h200 or h200:8'
            )
        first = (str(e).splitlines() or [""])[0]
        raise KvjaxError(f"cannot compile for {topology!r} ({first:.120}); {remedy}") from e
    return tuple(described.devices)


def make_mesh(topology: str, shape: Sequence[int], names: Sequence[str]) -> Mesh | AbstractMesh:
    """Lays the first devices of another machine out as a mesh of this shape and these axis names."""
    devices, count = open_topology(topology), math.prod(shape)
    if count > len(devices):
        raise KvjaxError(f"a mesh of {count} devices needs more than the {len(devices)} of {topology!r}")
    gpu, axis_types = topology.partition(":")[0], (AxisType.Auto,) * len(names)
    if gpu in GPUS:
        # Devices of a GPU topology do not know their memories, so that programs are lowered for abstract ones.
        device = AbstractDevice(*GPUS[gpu], "gpu")
        return AbstractMesh(tuple(shape), tuple(names), axis_types=axis_types, abstract_device=device)
    return Mesh(np.array(devices[:count]).reshape(shape), tuple(names), axis_types=axis_types)


@contextlib.contextmanager
def trace_for(topology: str) -> Iterator[None]:
    """Lets kvjax, which asks for the default backend while it is traced, take another machine's code inside the block.

    kvjax takes its kernels and layouts by the backend, so nothing traced for one backend may serve the other.
    """
    backend = "gpu" if topology.partition(":")[0] in GPUS else "tpu"
    jax.clear_caches()
    try:
        with mock.patch.object(jax, "default_backend", return_value=backend):
            yield
    finally:
        jax.clear_caches()


@dataclasses.dataclass(frozen=True)
class LoweredFor:
    """A program that is lowered for another machine."""

    lowered: Any
    devices: tuple[Any, ...] | None  # of a GPU topology; a TPU's are those of the mesh

    def text(self) -> str:
        """The program before the compiler has seen it; equal programs have equal texts."""
        return self.lowered.as_text()

    def compile(self) -> Any:
        """Compiles the program; the result is that of `Lowered.compile`."""
        if self.devices is None:
            return self.lowered.compile()
        # A program that is lowered for an abstract device would go to this machine's own compiler.
        self.lowered._lowering.compile_args["backend"] = self.devices[0].client
        return self.lowered.compile(device_assignment=self.devices)


def lower_for(
    topology: str,
    program: Any,
    arguments: dict[str, Any],
    static: Sequence[str],
    mesh: Mesh | AbstractMesh | None = None,
    *,
    is_loop: bool = False,
) -> LoweredFor:
    """Lowers a jitted program for another machine.

    Args:
      topology: `h200`, or a TPU topology; see `open_topology`.
      program: the jitted function.
      arguments: by name; only shapes, dtypes, memory kinds and partition specs of arrays count.
      static: names of the static arguments.
      mesh: of that machine, from `make_mesh`; by default its first device alone.
      is_loop: whether the program is a decode loop, whose argument `state` comes and returns in the formats that
        `kvjax.generation` gives it there.

    Raises:
      KvjaxError: if JAX cannot compile for that machine here.
    """
    mesh = make_mesh(topology, (1,), ("x",)) if mesh is None else mesh
    described = _move_to(mesh, arguments, static)
    with trace_for(topology):
        if is_loop and (formats := memory.loop_formats(described["state"])):
            leaves, structure = jax.tree.flatten(described["state"])
            leaves = [
                x if f is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=f)
                for x, f in zip(leaves, formats, strict=True)
            ]
            program = jit_loop(program.__wrapped__, described["state"])
            described["state"] = jax.tree.unflatten(structure, leaves)
        if isinstance(mesh, Mesh):
            return LoweredFor(program.lower(**described), None)
        with use_abstract_mesh(mesh):
            lowered = program.trace(**described).lower(lowering_platforms=("cuda",))
        return LoweredFor(lowered, open_topology(topology)[: mesh.size])


def compile_for(
    topology: str, program: Any, arguments: dict[str, Any], static: Sequence[str], *, is_loop: bool = False
) -> Any:
    """Compiles a jitted program for one device of another machine; see `lower_for`."""
    return lower_for(topology, program, arguments, static, is_loop=is_loop).compile()


def count_bytes(compiled: Any) -> int:
    """Bytes that a program reads and writes, as the compiler counts them: each loop's body once."""
    cost = compiled.cost_analysis()
    if cost is None:  # a GPU client without a device cannot count; any client counts the same instructions
        (module,) = compiled.runtime_executable().hlo_modules()
        cost = jaxlib._jax.hlo_module_cost_analysis(jax.devices()[0].client, module)
    return int(cost["bytes accessed"])


def _move_to(mesh: Mesh | AbstractMesh, arguments: dict[str, Any], static: Sequence[str]) -> dict[str, Any]:
    """Describes each array by shape, dtype, memory kind and partition spec on another machine's mesh."""

    def describe(x: Any) -> jax.ShapeDtypeStruct:
        given = getattr(x, "sharding", None)
        spec = given.spec if isinstance(given, NamedSharding) else PartitionSpec()
        is_described = isinstance(x, jax.ShapeDtypeStruct) and given is not None
        kind = given.memory_kind if is_described else memory.memory_kind(x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec, memory_kind=kind))

    return {name: x if name in static else jax.tree.map(describe, x) for name, x in arguments.items()}
