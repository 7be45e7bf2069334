"""Compiles programs for accelerators that this machine lacks: a TPU topology, such as "v5e:2x2", or a GPU, "h200".

Compiled programs can be read, not run. A TPU needs the package libtpu. A GPU needs the extra `gpu`, JAX >= 0.11.2, and
JAX_PLATFORMS=cpu on a machine without one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jaxlib
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from kvjax import KvjaxError
from kvjax.core import memory

GPUS = {"h200": ("NVIDIA H200", 132)}  # (name, multiprocessors) of each NAME.textproto in this folder
# libtpu must not query a TPU's metadata server, nor lock a TPU that no process can hold.
TPU_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def compile_for(topology: str, program: Any, arguments: dict[str, Any], static: Sequence[str]) -> Any:
    """Compiles a jitted program for another machine.

    Args:
      topology: a name of GPUS, or a TPU topology.
      program: the jitted function.
      arguments: by name; only shapes, dtypes and memory kinds of arrays count.
      static: names of the static arguments.

    Returns:
      the compiled program, as `Lowered.compile` returns it.

    Raises:
      KvjaxError: if JAX cannot compile for that machine here.
    """
    compile_program = _compile_for_gpu if topology in GPUS else _compile_for_tpu
    # kvjax takes its kernels and layouts by the backend, so nothing traced for one backend may serve the other.
    jax.clear_caches()
    try:
        return compile_program(topology, program, arguments, static)
    finally:
        jax.clear_caches()


def count_bytes(compiled: Any) -> int:
    """Bytes that a program reads and writes, as the compiler counts them: each loop's body once."""
    cost = compiled.cost_analysis()
    if cost is None:  # a GPU client without a device cannot count; any client counts the same instructions
        (module,) = compiled.runtime_executable().hlo_modules()
        cost = jaxlib._jax.hlo_module_cost_analysis(jax.devices()[0].client, module)
    return int(cost["bytes accessed"])


def _compile_for_tpu(topology: str, program: Any, arguments: dict[str, Any], static: Sequence[str]) -> Any:
    os.environ |= TPU_ENVIRONMENT
    with _name_remedy(topology, "pip install libtpu"):
        target = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    described = _move_to(Mesh([target.devices[0]], ("x",)), arguments, static)
    # kvjax asks for the default backend while it is traced; this is how it takes a TPU's code on a CPU.
    with mock.patch.object(jax, "default_backend", return_value="tpu"):
        return program.lower(**described).compile()


def _compile_for_gpu(topology: str, program: Any, arguments: dict[str, Any], static: Sequence[str]) -> Any:
    config = Path(__file__).with_name(f"{topology}.textproto").read_text()
    remedy = 'pip install "jax[cuda13]>=0.11.2" (Python >= 3.12), and set JAX_PLATFORMS=cpu'
    with _name_remedy(topology, remedy):
        # Without a GPU no driver answers for its registers, caches and clocks; a file has them.
        target = topologies.get_topology_desc("", "cuda", target_config=config, topology="1x1x1")
    name, multiprocessors = GPUS[topology]
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(name, multiprocessors, "gpu"))
    described = _move_to(mesh, arguments, static)
    with mock.patch.object(jax, "default_backend", return_value="gpu"), use_abstract_mesh(mesh):
        lowered = program.trace(**described).lower(lowering_platforms=("cuda",))
    # Devices of this topology do not know their memories, so the program is lowered for an abstract device; JAX would
    # then take this machine's own compiler.
    device = target.devices[0]
    lowered._lowering.compile_args["backend"] = device.client
    return lowered.compile(device_assignment=(device,))


@contextlib.contextmanager
def _name_remedy(topology: str, remedy: str) -> Iterator[None]:
    """Turns every error into a KvjaxError that names the remedy."""
    try:
        yield
    except Exception as e:  # its type depends on the missing package
        first = (str(e).splitlines() or [""])[0]
        raise KvjaxError(f"cannot compile for {topology!r} ({first:.120}); {remedy}") from e


def _move_to(mesh: Mesh | AbstractMesh, arguments: dict[str, Any], static: Sequence[str]) -> dict[str, Any]:
    """Replaces each array by its shape and dtype in the same kind of memory of another machine."""

    def describe(x: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=memory.memory_kind(x))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return {name: x if name in static else jax.tree.map(describe, x) for name, x in arguments.items()}
