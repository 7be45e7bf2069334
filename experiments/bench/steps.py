"""What a decode step is compiled to, method by method: launches, copies, traffic with the host, bytes.

python -m experiments.bench.steps [--methods "full;kcache:n=64"] [--layers 2] [--tokens 1000] [--topology v5e:2x2]

The program is that of a whole loop, and its body is one step. A launch is an instruction that runs by itself: a fusion
counts once, what stands inside it not. "Host" are those that read or write host memory; "fetches" those that bring
something from there to the device, and "waits" the fetches behind which nothing else is launched until they are done.
"Outside" are copies of whole buffers to or from the host, before the loop or behind it. Bytes are those that the
compiler counts for the program with one step in it; the bound is what an exact step must read. --topology compiles for
a machine that is not there (`absent.py` says what that wants), each method in a process of its own; without it the
program is that of this machine. A CPU's program keeps the host's memory not apart from the device's.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import kvjax
from experiments.bench.absent import bytes_counted, compiled_for
from experiments.bench.common import machine, progress, report, table
from experiments.bench.process import Killed, alone
from experiments.bench.shapes import SHAPES, decode_bytes
from kvjax import KvjaxError
from kvjax.methods.strings import split_list
from kvjax.models import Config
from kvjax.utils.arguments import dtype_name

METHODS = "full;int8;kivi:bits=2;snapkv:budget=256;offload;kcache:n=64;specache:bits=2"
METHODS += ";quest:budget=256,device_layers=0;h2o:heavy=128,recent=128"
NEW = 8  # tokens that the loop may decode
HOST = "S(5)"  # XLA's name of the host's memory in a layout
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<kind>[a-z][a-z0-9\-]*)\(%?(?P<first>[\w.\-]*)"
)
PARTS = re.compile(r"(?:body|to_apply|branch_computations)=\{?%?([\w.\-]+)")
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id"}
PRODUCTS = {"dot", "convolution"}


class Launch(NamedTuple):
    """One instruction of a compiled program: what it is called, what it gives, its kind and first operand."""

    name: str
    type: str
    kind: str
    first: str
    line: str


@dataclasses.dataclass(frozen=True)
class Step:
    """What the compiled loop does in one step, and once before it."""

    launches: int
    fusions: int
    products: int  # that are in no fusion
    copies: int
    host: int  # launches that touch the host's memory
    fetches: int  # launches that bring something from the host
    waits: int  # fetches that nothing runs beside
    outside: int  # copies of whole host buffers before or behind the loop

    @classmethod
    def of(cls, program: str) -> Step:
        """Read off the text of a compiled program; raises KvjaxError where it has no loop."""
        parts, entry = _computations(program)
        loops = [name for line in parts[entry] if " while(" in line for name in re.findall(r"body=%?([\w.\-]+)", line)]
        if not loops:
            raise KvjaxError("the compiled program has no loop")
        body = max((list(_within(parts, name)) for name in loops), key=len)
        launched = [x for x in body if not x.kind.endswith("-done")]
        kinds = collections.Counter(x.kind for x in launched)
        beside = _beside_fetches(body)
        return cls(
            launches=len(launched),
            fusions=kinds["fusion"],
            products=sum(kinds[kind] for kind in PRODUCTS),
            copies=kinds["copy"] + kinds["copy-start"],
            host=sum(HOST in x.line for x in launched),
            fetches=len(beside),
            waits=beside.count(0),
            outside=sum(" copy-start(" in line and HOST in line for line in parts[entry]),
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


def _within(parts: dict[str, list[str]], name: str) -> Iterator[Launch]:
    """What a computation launches and waits for, with that of the loops, calls and branches in it."""
    for line in parts[name]:
        found = INSTRUCTION.match(line)
        if found is None or found["kind"] in FREE:
            continue
        if found["kind"] in ("while", "call", "conditional"):
            for part in PARTS.findall(line):
                yield from _within(parts, part)
        else:
            yield Launch(**found.groupdict(), line=line)


def _beside_fetches(body: Sequence[Launch]) -> list[int]:
    """For each thing that is brought from the host, how many launches stand between its start and the wait for it.

    Other transfers do not count.
    """
    started: dict[str, int] = {}  # what else had been launched by then
    launched, found = 0, []
    for x in body:
        if x.kind.endswith("-start"):
            started |= {x.name: launched} if HOST in x.line else {}
        elif not x.kind.endswith("-done"):
            launched += 1
        elif x.first in started and HOST not in x.type:
            found.append(launched - started[x.first])
    return found


def measured(config: Config, dtype: str, method: str, tokens: int, topology: str | None) -> dict[str, Any]:
    """The step of a method behind a random prompt, as a record."""
    model = kvjax.random_model(config, dtype=dtype)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, tokens))
    decoding = kvjax.read(model, ids, method, room=NEW).start(max_new_tokens=NEW, loop="while")
    program, arguments = decoding.loop_program()
    if topology:
        compiled = compiled_for(topology, program, arguments, static=("target",))
    else:
        compiled = program.lower(**arguments).compile()
    sizes = compiled.memory_analysis()
    found = dataclasses.asdict(Step.of(compiled.as_text()))
    found |= {"device_bytes": sizes.argument_size_in_bytes, "host_bytes": sizes.host_argument_size_in_bytes}
    found |= {"workspace_bytes": sizes.temp_size_in_bytes, "counted_bytes": bytes_counted(compiled)}
    return {"method": method, **found, "bound_bytes": int(decode_bytes(model.config, model.params, 1, tokens))}


COLUMNS = ("method", "launches", "fusions", "products", "copies", "host", "fetches", "waits", "outside")
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
    parser.add_argument("--methods", type=split_list, default=split_list(METHODS), help='separated by ";"')
    parser.add_argument("--shape", choices=SHAPES, default="125m")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1000, help="of the prompt")
    parser.add_argument("--dtype", type=dtype_name, choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--topology", help="compile for what is not there: h200, or a TPU such as v5e:2x2")
    args = parser.parse_args(argv)
    before, results = machine(), []
    config = dataclasses.replace(SHAPES[args.shape], layers=args.layers)
    measure = functools.partial(alone, measured) if args.topology else measured  # such a compiler may end its process
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
