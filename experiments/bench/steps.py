"""The compiled decode step of each method: launches, copies, traffic with the host, bytes.

python -m experiments.bench.steps [--methods "full;kcache:n=64"] [--layers 2] [--tokens 1000] [--topology v5e:2x2]

The program is a whole decode loop; the loop's body is one step. A launch is an instruction that runs by itself: a
fusion counts once, its instructions do not. "host" counts launches that read or write host memory, "fetches" transfers
from there to the device, "waits" fetches that no other launch overlaps, and "outside" copies of whole host buffers
before or after the loop. "counted MB" is the compiler's figure for the program with one step; "bound MB" is what an
exact step must read. --topology compiles for an accelerator that this machine lacks (`cross_compile.py` names the
packages), each method in a process of its own. A program for a CPU does not separate host from device memory.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from experiments.bench import measuring
from experiments.bench.cross_compile import compile_for, count_bytes
from experiments.bench.process import Killed, run_in_process
from experiments.bench.shapes import SHAPES, decode_bytes
from experiments.bench.traffic import FREE, HOST, Instruction, Program
from kvjax import KvjaxError
from kvjax.eval.run.machine import machine
from kvjax.models import Config
from kvjax.registry.strings import split_list
from kvjax.utils.arguments import dtype_name

METHODS = "full;int8;kivi:bits=2;snapkv:budget=256;offload;kcache:n=64;specache:bits=2"
METHODS += ";quest:budget=256,device_layers=0;h2o:heavy=128,recent=128"
NEW_TOKENS = 8  # the loop's body, one step, is the same for any number


@dataclasses.dataclass(frozen=True)
class Step:
    """Counts of one step of a compiled loop, and of the copies outside the loop."""

    launches: int
    fusions: int
    products: int  # outside fusions
    copies: int
    host: int  # launches that read or write host memory
    fetches: int  # transfers from the host to the device
    waits: int  # fetches that no other launch overlaps
    outside: int  # copies of whole host buffers before or after the loop

    @classmethod
    def from_program(cls, program: Program) -> Step:
        """Counts in a compiled program; raises KvjaxError if it has no loop."""
        body = [x for x in program.unrolled(program.body) if x.kind not in FREE]
        # A start and its done are one launch.
        launched = [x for x in body if not x.kind.endswith("-done")]
        kinds = collections.Counter(x.kind for x in launched)
        overlaps = _fetch_overlaps(body)
        before_and_after = program.computations[program.entry].values()
        return cls(
            launches=len(launched),
            fusions=kinds["fusion"],
            products=kinds["dot"] + kinds["convolution"],
            copies=kinds["copy"] + kinds["copy-start"],
            host=sum(x.is_on_host for x in launched),
            fetches=len(overlaps),
            waits=overlaps.count(0),
            outside=sum(x.kind == "copy-start" and x.is_on_host for x in before_and_after),
        )


def _fetch_overlaps(body: Sequence[Instruction]) -> list[int]:
    """For each fetch from the host, the number of launches between its start and its end, other transfers left out."""
    started: dict[str, int] = {}  # fetch -> launches before it
    launched, found = 0, []
    for x in body:
        if x.kind.endswith("-start"):
            started |= {x.name: launched} if x.is_on_host else {}
        elif not x.kind.endswith("-done"):
            launched += 1
        elif x.operands[0] in started and any(space != HOST for _, space in x.types):
            found.append(launched - started[x.operands[0]])
    return found


def compile_step(config: Config, dtype: str, method: str, tokens: int, topology: str | None) -> dict[str, Any]:
    """Compiles the decode loop of a method after a random prompt; returns its counts as a record."""
    model = kvjax.random_model(config, dtype=dtype)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, tokens))
    decoding = kvjax.read(model, ids, method, headroom=NEW_TOKENS).start(max_new_tokens=NEW_TOKENS, loop="while")
    program, arguments = decoding.loop_program()
    if topology:
        compiled = compile_for(topology, program, arguments, static=("target",), is_loop=True)
    else:
        compiled = program.lower(**arguments).compile()
    sizes = compiled.memory_analysis()
    found = dataclasses.asdict(Step.from_program(Program.from_text(compiled.as_text())))
    found |= {"device_bytes": sizes.argument_size_in_bytes, "host_bytes": sizes.host_argument_size_in_bytes}
    found |= {"workspace_bytes": sizes.temp_size_in_bytes, "counted_bytes": count_bytes(compiled)}
    return {"method": method, **found, "bound_bytes": int(decode_bytes(model.config, model.params, 1, tokens))}


def compile_or_explain(config: Config, dtype: str, method: str, tokens: int, topology: str | None) -> dict[str, Any]:
    """`compile_step`, or a record with the reason why it cannot be."""
    try:
        return compile_step(config, dtype, method, tokens, topology)
    except KvjaxError as e:
        return {"method": method, "reason": str(e)}


COLUMNS = ("method", "launches", "fusions", "products", "copies", "host", "fetches", "waits", "outside")
COLUMNS += ("device MB", "host MB", "workspace MB", "counted MB", "bound MB")


def row(found: dict[str, Any]) -> list[Any]:
    """Formats a record; dashes where nothing was compiled."""
    if "reason" in found:
        return [found["method"], *[None] * (len(COLUMNS) - 1)]
    sizes = [found[f"{name}_bytes"] / 1e6 for name in ("device", "host", "workspace", "counted", "bound")]
    return [found["method"], *(found[field.name] for field in dataclasses.fields(Step)), *(f"{x:.1f}" for x in sizes)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--methods", type=split_list, default=split_list(METHODS), help='separated by ";"')
    parser.add_argument("--shape", choices=SHAPES, default="125m")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1000, help="of the prompt")
    parser.add_argument("--dtype", type=dtype_name, choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--topology", help="compile for another accelerator: h200, or a TPU such as v5e:2x2")
    args = parser.parse_args(argv)
    before, results = machine(), []
    config = SHAPES[args.shape].with_layers((0,) * args.layers)
    # A compiler for another machine may abort the process.
    measure = functools.partial(run_in_process, compile_or_explain) if args.topology else compile_or_explain
    for method in args.methods:
        measuring.log_progress(method)
        try:
            results.append(measure(config, args.dtype, method, args.tokens, args.topology))
        except Killed as e:
            measuring.log_progress(f"{method}: {e}")
            results.append({"method": method, "reason": str(e)})
    where = args.topology or f"this machine's {jax.default_backend()}"
    title = (
        f"A step of {args.layers} layers of {args.shape}, {args.dtype}, {args.tokens} tokens in the cache, for {where}"
    )
    lines = [row(found) for found in results]
    notes = [f"{found['method']}: {found['reason']}" for found in results if "reason" in found]
    measuring.report(
        "steps", before, [measuring.table(title, COLUMNS, lines)], notes, {"settings": vars(args), "steps": results}
    )


if __name__ == "__main__":
    main()
