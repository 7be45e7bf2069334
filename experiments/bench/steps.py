"""What a decode step is compiled to, method by method: launches, copies, traffic with the host, bytes.

python -m experiments.bench.steps [--methods "full;kcache:n=64"] [--layers 2] [--tokens 1000] [--topology v5e:2x2]

The program is that of a whole loop, and its body is one step. A launch is an instruction that runs by itself: a fusion
counts once, what stands inside it not. "Touch the host" are those that read or write host memory; "before the loop" are
copies of whole buffers to or from the host, once per answer. Bytes are those that the compiler counts for the program
with one step in it; the bound is what an exact step must read. --topology compiles for a TPU that is not there, with
the package libtpu (`pip install libtpu`), each method in a process of its own; without it the program is that of this
machine. A CPU's program keeps the host's memory not apart from the device's.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax
from experiments.bench.common import machine, progress, report, table
from experiments.bench.process import Killed, alone
from experiments.bench.shapes import SHAPES, decode_bytes
from kvjax import KvjaxError
from kvjax.core import memory
from kvjax.methods.strings import split_many
from kvjax.models import Config
from kvjax.run.loop import UNTIL

METHODS = "full;int8;kivi:bits=2;snapkv:budget=256;offload;kcache:n=64;specache:bits=2"
METHODS += ";quest:budget=256,device_layers=0;h2o:heavy=128,recent=128"
NEW = 8  # tokens that the loop may decode
HOST = "S(5)"  # XLA's name of the host's memory in a layout
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][a-z0-9\-]*)\(")
PARTS = re.compile(r"(?:body|to_apply|branch_computations)=\{?%?([\w.\-]+)")
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id"}
PRODUCTS = {"dot", "convolution"}
# There is no TPU to ask about, and none that two processes could want at once.
ABSENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclasses.dataclass(frozen=True)
class Step:
    """What the compiled loop does in one step, and once before it."""

    launches: int
    fusions: int
    products: int  # that are in no fusion
    copies: int
    host: int  # launches that touch the host's memory
    host_before: int  # copies of whole host buffers before or behind the loop

    @classmethod
    def of(cls, program: str) -> Step:
        """Read off the text of a compiled program; raises KvjaxError where it has no loop."""
        parts, entry = _computations(program)
        loops = [name for line in parts[entry] if " while(" in line for name in re.findall(r"body=%?([\w.\-]+)", line)]
        if not loops:
            raise KvjaxError("the compiled program has no loop")
        body = max((list(_within(parts, name)) for name in loops), key=len)
        kinds = collections.Counter(kind for kind, _ in body)
        return cls(
            launches=len(body),
            fusions=kinds["fusion"],
            products=sum(kinds[kind] for kind in PRODUCTS),
            copies=kinds["copy"] + kinds["copy-start"],
            host=sum(HOST in line for _, line in body),
            host_before=sum(" copy-start(" in line and HOST in line for line in parts[entry]),
        )


def _computations(program: str) -> tuple[dict[str, list[str]], str]:
    """(the lines of each computation by its name, the name of the first that runs)."""
    parts: dict[str, list[str]] = {}
    entry = name = ""
    for line in program.splitlines():
        if found := COMPUTATION.match(line):
            name = found[2]
            parts[name] = []
            entry = name if found[1] else entry
        elif name:
            parts[name].append(line)
    return parts, entry


def _within(parts: dict[str, list[str]], name: str) -> Iterator[tuple[str, str]]:
    """(kind, line) of what a computation launches, with that of the loops, calls and branches in it."""
    for line in parts[name]:
        found = INSTRUCTION.match(line)
        if found is None or found[1] in FREE or found[1].endswith("-done"):
            continue
        if found[1] in ("while", "call", "conditional"):
            for part in PARTS.findall(line):
                yield from _within(parts, part)
        else:
            yield found[1], line


@contextlib.contextmanager
def target(topology: str | None) -> Iterator[jax.sharding.Mesh | None]:
    """The mesh of one device to compile for, which kvjax takes for the machine's; None is this machine.

    Raises KvjaxError where JAX cannot compile for the topology here.
    """
    if topology is None:
        yield None
        return
    try:
        there = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    except Exception as e:  # of any kind, by what is missing
        first = (str(e).splitlines() or [""])[0]
        raise KvjaxError(f"cannot compile for {topology!r} ({first:.120}); pip install libtpu") from e
    jax.clear_caches()
    with mock.patch.object(jax, "default_backend", return_value="tpu"):
        yield Mesh([there.devices[0]], ("x",))
    jax.clear_caches()


def measured(config: Config, dtype: str, method: str, tokens: int, topology: str | None) -> dict[str, Any]:
    """The step of a method behind a random prompt, as a record."""
    model = kvjax.random_model(config, dtype=dtype)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, tokens))
    decoding = kvjax.read(model, ids, method, room=NEW).start(max_new_tokens=NEW, loop="while")
    arguments = decoding.arguments() | {"limit": decoding.carry.i}
    with target(topology) as mesh:
        if mesh is not None:
            arguments = {k: x if k in UNTIL._static else jax.tree.map(_there(mesh), x) for k, x in arguments.items()}
        compiled = UNTIL.lower(**arguments).compile()
    sizes, cost = compiled.memory_analysis(), compiled.cost_analysis()
    found = dataclasses.asdict(Step.of(compiled.as_text()))
    found |= {"device_bytes": sizes.argument_size_in_bytes, "host_bytes": sizes.host_argument_size_in_bytes}
    found |= {"workspace_bytes": sizes.temp_size_in_bytes, "counted_bytes": int(cost["bytes accessed"])}
    return {"method": method, **found, "bound_bytes": int(decode_bytes(model.config, model.params, 1, tokens))}


def _there(mesh: Mesh) -> Any:
    """Describes an array as one of the same memory on another machine."""

    def described(x: jax.Array) -> jax.ShapeDtypeStruct:
        kind = "pinned_host" if memory.is_host(x) else "device"
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(), memory_kind=kind))

    return described


COLUMNS = ("method", "launches", "fusions", "products", "copies", "touch the host", "before the loop")
COLUMNS += ("device MB", "host MB", "workspace MB", "counted MB", "bound MB")


def row(found: dict[str, Any]) -> list[Any]:
    """A line of the table; of a method that the compiler did not survive, the dashes say so."""
    if len(found) == 1:
        return [found["method"], *[None] * (len(COLUMNS) - 1)]
    sizes = [found[f"{name}_bytes"] / 1e6 for name in ("device", "host", "workspace", "counted", "bound")]
    return [found["method"], *(found[field.name] for field in dataclasses.fields(Step)), *(f"{x:.1f}" for x in sizes)]


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles and prints; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=split_many, default=split_many(METHODS), help='separated by ";"')
    parser.add_argument("--shape", choices=SHAPES, default="125m")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1000, help="of the prompt")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--topology", help="such as v5e:2x2: compile for a TPU that is not there")
    args = parser.parse_args(argv)
    if args.topology:
        os.environ |= ABSENT
    before, results = machine(), []
    config = dataclasses.replace(SHAPES[args.shape], layers=args.layers)
    measure = functools.partial(alone, measured) if args.topology else measured  # TPU's compiler may end its process
    for method in args.methods:
        progress(method)
        try:
            results.append(measure(config, args.dtype, method, args.tokens, args.topology))
        except Killed as e:
            progress(f"{method}: {e}")
            results.append({"method": method})
    where = args.topology or f"this machine's {jax.default_backend()}"
    title = f"A step of {args.layers} layers of {args.shape}, {args.dtype}, {args.tokens} tokens held, for {where}"
    told = table(title, COLUMNS, [row(found) for found in results])
    report("steps", before, [told], [], {"settings": vars(args), "steps": results})


if __name__ == "__main__":
    main()
