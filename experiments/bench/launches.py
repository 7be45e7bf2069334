"""The launches of one layer in a decode loop that is compiled for a GPU, with the bytes of each and its predicted time.

python -m experiments.bench.launches [--methods "full;specache:bits=2"] [--batch 4] [--tokens 32768] [--list]

A layer's launches are those that the loop has more with two layers of the kind than with one. The layer is the one in
the middle of the plan, since methods treat the first ones differently. A launch is a kernel, a library's call, or a
copy; a fusion counts once, a loop's body as often as it runs. A launch is predicted to take `--launch` microseconds,
or what its bytes take at `--bandwidth` if that is longer. Bytes are those in the device's memory, see `traffic.py`:
what a kernel of Pallas takes in counts whole. No weights are made and nothing runs. `cross_compile.py` says what an
H200 needs.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.bench import aot, measuring
from experiments.bench.cross_compile import make_mesh, trace_for
from experiments.bench.process import Killed, run_in_process
from experiments.bench.traffic import CALLED, FREE, RUN, Instruction, Program
from kvjax.engine.plan import bind
from kvjax.eval.run.machine import machine
from kvjax.registry.strings import split_list

METHODS = "full;int8;kivi:bits=2;kcache:n=128;specache:bits=2,group=64,residual=128;quest:budget=1024"
SCOPE = re.compile(r"/attention/attention/|/mlp/|jit\(\w+\)/")  # what every name of an operation begins with
OP_NAME = re.compile(r'op_name="([^"]*)"')
OPCODE = re.compile(r"^(?!parameter|constant|bitcast|tuple|get-tuple|broadcast|reshape|copy|convert)[a-z-]+$")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a step."""

    kind: str  # of the instruction, or what a kernel is called
    place: str  # the operation that it ends with, in the names of the program's scopes
    does: str  # the operations fused into it, of which each counts once
    rounds: int  # how often a step runs it
    num_bytes: int  # of one run, in the device's memory

    def microseconds(self, launch: float, bandwidth: float) -> float:
        """Predicted time of all runs: of launching it, or of its bytes at a bandwidth in bytes a second."""
        return self.rounds * max(launch, self.num_bytes / bandwidth * 1e6)


def find_launches(program: Program) -> Iterator[Launch]:
    """Yields the launches of a step, in the order of the program."""
    yield from _launches_of(program, program.body, 1)


def _launches_of(program: Program, computation: str, rounds: int) -> Iterator[Launch]:
    for x in program.computations[computation].values():
        if x.kind in ("while", "call", "conditional"):
            inside = rounds * (program.num_rounds(x) if x.kind == "while" else 1)
            for name in RUN.findall(x.text):
                yield from _launches_of(program, name, inside)
        elif x.kind not in FREE and not x.kind.endswith("-done"):
            yield _describe(program, computation, x, rounds)


def _describe(program: Program, computation: str, x: Instruction, rounds: int) -> Launch:
    found = OP_NAME.search(x.text)
    path = SCOPE.split(found[1]) if found else [""]
    target = re.search(r'custom_call_target="([^"]*)"', x.text)
    inside: list[str] = []
    for name in CALLED.findall(x.text) if x.kind.startswith("fusion") else ():
        inside += [y.kind for y in program.computations.get(name, {}).values() if OPCODE.match(y.kind)]
    does = " ".join(dict.fromkeys(inside))
    kind = target[1].lstrip("_$") if target else re.sub(r"[._]*\d+(\.\d+)*$", "", x.name)
    return Launch(kind, path[-1], does, rounds, program.instruction_bytes(computation, x))


def compile_layer(method: str, model: str, topology: str, tokens: int, batch: int) -> list[Launch]:
    """Returns the launches that one more layer of a method's usual kind brings to its decode loop."""
    config = aot.find_config(model)
    shapes = aot.Shapes(topology, config, tokens, make_mesh(topology, (1, 1), aot.MESH), batch)
    with trace_for(topology):
        layer = bind(method, config)[config.layers // 2]
        state = shapes.state(layer)

    def compile_loop(num_layers: int) -> list[Launch]:
        compiled = aot.lower_decode(shapes, [layer] * num_layers, [state] * num_layers).compile()
        return list(find_launches(Program.from_text(compiled.as_text())))

    one, two = compile_loop(1), compile_loop(2)
    rest, more = collections.Counter(one), []
    for launch in two:
        if rest[launch] > 0:
            rest[launch] -= 1
        else:
            more.append(launch)
    # A launch that differs a little between the programs is in both lists: what only the smaller one has, goes again.
    for launch in rest.elements():
        same = [x for x in more if (x.kind, x.rounds) == (launch.kind, launch.rounds)]
        same = [x for x in same if x.place == launch.place] or same
        if same:
            more.remove(same[0])
    return more


COLUMNS = "method", "launches", "of which fusions", "kernels and calls", "copies", "MB", "predicted us"


def row(method: str, launches: Sequence[Launch] | str, launch: float, bandwidth: float) -> list[Any]:
    """Formats a layer's launches, or the reason why there are none."""
    if isinstance(launches, str):
        return [method, *[None] * (len(COLUMNS) - 1)]
    runs = collections.Counter[str]()
    for x in launches:
        is_copy, is_call = x.kind.startswith("copy"), not x.does and not x.kind.startswith("copy")
        runs["copies" if is_copy else "calls" if is_call else "fusions"] += x.rounds
    moved = sum(x.num_bytes * x.rounds for x in launches) / 1e6
    time = sum(x.microseconds(launch, bandwidth) for x in launches)
    return [method, runs.total(), runs["fusions"], runs["calls"], runs["copies"], f"{moved:,.1f}", f"{time:.0f}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--methods", type=split_list, default=split_list(METHODS), help='separated by ";"')
    parser.add_argument("--model", default="llama-3.1-8b", help="a name of kvjax.planning, or small or 125m")
    parser.add_argument("--topology", default="h200")
    parser.add_argument("--tokens", type=int, default=aot.TOKENS, help="of each prompt")
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--launch", type=float, default=2.5, help="microseconds of a launch")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="of the device's memory, bytes a second")
    parser.add_argument("--list", action="store_true", help="every launch of each method, too")
    args = parser.parse_args(argv)
    before = machine()
    results: dict[str, Any] = {}
    for method in args.methods:
        measuring.log_progress(method)
        try:  # a compiler for another machine may abort the process
            arguments = method, args.model, args.topology, args.tokens, args.batch
            results[method] = run_in_process(compile_layer, *arguments)
        except (Killed, SystemExit) as e:
            results[method] = str(e)
    title = f"One layer of {args.model}, {args.tokens} tokens, {args.batch} sequences, compiled for {args.topology}"
    lines = [row(method, launches, args.launch, args.bandwidth) for method, launches in results.items()]
    tables = [measuring.table(title, COLUMNS, lines)]
    for method, launches in results.items() if args.list else ():
        listed = [] if isinstance(launches, str) else launches
        cells = [
            [i, x.kind, x.place, x.does[:60], x.rounds, f"{x.num_bytes / 1e6:.2f}"] for i, x in enumerate(listed, 1)
        ]
        tables.append(measuring.table(method, ("", "kind", "ends with", "fused", "rounds", "MB"), cells))
    notes = [f"{method}: {found}" for method, found in results.items() if isinstance(found, str)]
    cells = {k: v if isinstance(v, str) else [dataclasses.asdict(x) for x in v] for k, v in results.items()}
    measuring.report("launches", before, tables, notes, {"settings": vars(args), "layers": cells})


if __name__ == "__main__":
    main()
