"""Compiling for machines that are not there: a TPU by its topology, such as "v5e:2x2", or an NVIDIA GPU, "h200".

What comes of it can be read, not run. A TPU wants the package libtpu. A GPU wants the extra `gpu` and JAX >= 0.11.2,
with JAX_PLATFORMS=cpu where there is none.
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

GPUS = {"h200": ("NVIDIA H200", 132)}  # what a file beside this one describes: its name, its multiprocessors
# There is no TPU to ask about, and none that two processes could want at once.
ALONE = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def compiled_for(topology: str, program: Any, arguments: dict[str, Any], static: Sequence[str]) -> Any:
    """A jitted program compiled for arguments like these on another machine, which kvjax takes for this one.

    Raises KvjaxError where JAX cannot compile for it here.
    """
    compiled = _for_gpu if topology in GPUS else _for_tpu
    jax.clear_caches()
    try:
        return compiled(topology, program, arguments, static)
    finally:
        jax.clear_caches()


def bytes_counted(compiled: Any) -> int:
    """What the compiler counts that a program reads and writes, a loop's step once."""
    cost = compiled.cost_analysis()
    if cost is None:  # a GPU that is not there does not count; the instructions are the same to any other client
        (module,) = compiled.runtime_executable().hlo_modules()
        cost = jaxlib._jax.hlo_module_cost_analysis(jax.devices()[0].client, module)
    return int(cost["bytes accessed"])


def _for_tpu(topology: str, program: Any, arguments: dict[str, Any], static: Sequence[str]) -> Any:
    os.environ |= ALONE
    with _or_say(topology, "pip install libtpu"):
        there = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    described = _described(arguments, static, Mesh([there.devices[0]], ("x",)))
    with mock.patch.object(jax, "default_backend", return_value="tpu"):
        return program.lower(**described).compile()


def _for_gpu(topology: str, program: Any, arguments: dict[str, Any], static: Sequence[str]) -> Any:
    config = Path(__file__).with_name(f"{topology}.textproto").read_text()
    remedy = 'pip install "jax[cuda13]>=0.11.2" (Python >= 3.12), and set JAX_PLATFORMS=cpu'
    with _or_say(topology, remedy):
        there = topologies.get_topology_desc("", "cuda", target_config=config, topology="1x1x1")
    name, multiprocessors = GPUS[topology]
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(name, multiprocessors, "gpu"))
    described = _described(arguments, static, mesh)
    with mock.patch.object(jax, "default_backend", return_value="gpu"), use_abstract_mesh(mesh):
        lowered = program.trace(**described).lower(lowering_platforms=("cuda",))
    # Devices of this topology do not know their memories, so the program is lowered for none; JAX then takes the
    # machine's own compiler, unless it is told.
    device = there.devices[0]
    lowered._lowering.compile_args["backend"] = device.client
    return lowered.compile(device_assignment=(device,))


@contextlib.contextmanager
def _or_say(topology: str, remedy: str) -> Iterator[None]:
    """Names the remedy in the error of whatever goes wrong."""
    try:
        yield
    except Exception as e:  # of any kind, by what is missing
        first = (str(e).splitlines() or [""])[0]
        raise KvjaxError(f"cannot compile for {topology!r} ({first:.120}); {remedy}") from e


def _described(arguments: dict[str, Any], static: Sequence[str], mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """The arguments, with what says that an array lies in the same memory of another machine in place of each array."""

    def there(x: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=memory.memory_kind(x))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return {name: x if name in static else jax.tree.map(there, x) for name, x in arguments.items()}
