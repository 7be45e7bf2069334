"""Compile time: seconds of the first `generate`, cold and with compiled programs on disk.

python -m experiments.bench.compile [--methods "full;snapkv;kivi:bits=2;specache:bits=2"] [--depths 4,12,32]
python -m experiments.bench.compile --model smollm2-135m [--loop while]

`generate` of one short prompt compiles all that it needs. It runs twice: with an empty folder of compiled programs, and
again after the process has dropped its programs and reads them from the folder. Figures are seconds of wall clock;
tracing, lowering and compiling are JAX's own figures, by program in the JSON document.
"""

from __future__ import annotations

import collections
import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

import kvjax
from experiments.bench import measuring
from experiments.bench.shapes import SHAPES
from kvjax.core import compile_cache
from kvjax.eval.run.machine import machine
from kvjax.generation.options import LOOPS

METHODS = "full;snapkv;kivi:bits=2;specache:bits=2"
STAGES = {
    "trace": "/jax/core/compile/jaxpr_trace_duration",
    "lower": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "compile": "/jax/core/compile/backend_compile_duration",  # or the time to read the program from the disk
}
PROMPT = list(range(1, 9))  # short, since compiling does not depend on the length, and running would count too


@contextlib.contextmanager
def record_stages() -> Iterator[dict[str, dict[str, float]]]:
    """Collects the seconds that JAX reports within the block, by stage and program."""
    seconds: dict[str, dict[str, float]] = {stage: collections.defaultdict(float) for stage in STAGES}
    stages = {event: stage for stage, event in STAGES.items()}

    def listen(event: str, duration: float, *, fun_name: str = "", **_: Any) -> None:
        if event in stages:
            # JAX calls a function `f` while it traces it, and its program `jit(f)`.
            seconds[stages[event]][fun_name.removeprefix("jit(").removesuffix(")")] += duration

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def time_generate(model: kvjax.Model, method: str, tokens: int, loop: str | None = None) -> dict[str, Any]:
    """One `generate` after the process has dropped all programs: seconds, stages and the number of programs."""
    # The warm run would otherwise find its programs in the process and read no disk.
    compile_cache.clear_compiled()
    with record_stages() as seconds:
        start = time.perf_counter()
        kvjax.generate(model, [PROMPT], method, max_new_tokens=tokens, eos_ids=(), loop=loop)
        total = time.perf_counter() - start
    return {"seconds": total, "programs": len(seconds["compile"]), "stages": {s: dict(x) for s, x in seconds.items()}}


def measure(model: kvjax.Model, method: str, tokens: int, loop: str | None = None) -> dict[str, Any]:
    """One `generate` with an empty folder of compiled programs, then one with that folder."""
    with new_program_folder():
        runs = {name: time_generate(model, method, tokens, loop) for name in ("cold", "warm")}
    return {"method": method, "layers": model.config.layers, "loop": loop, **runs}


@contextlib.contextmanager
def new_program_folder() -> Iterator[None]:
    """Keeps compiled programs in a new folder within the block."""
    before = jax.config.jax_compilation_cache_dir
    with tempfile.TemporaryDirectory() as folder:
        compile_cache.use_compilation_cache(Path(folder))
        compilation_cache.reset_cache()  # JAX opens a folder once in a process, whatever its option says later
        try:
            yield
        finally:
            jax.config.update("jax_compilation_cache_dir", before)
            compilation_cache.reset_cache()


COLUMNS = ("method", "layers", "cold, s", "trace", "lower", "compile", "programs", "warm, s")


def row(cell: dict[str, Any]) -> list[Any]:
    """Formats the results of one method and depth."""
    # Stages are shown for the cold run alone: in the warm one, "compile" is the time to read a program.
    cold = cell["cold"]
    parts = (f"{sum(cold['stages'][stage].values()):.2f}" for stage in STAGES)
    seconds = [f"{cell[name]['seconds']:.2f}" for name in ("cold", "warm")]
    return [cell["method"], cell["layers"], seconds[0], *parts, cold["programs"], seconds[1]]


def main(argv: Sequence[str] | None = None) -> None:
    p = measuring.make_parser(__doc__)
    p.add_argument("--methods", default=METHODS, help='separated by ";"')
    p.add_argument("--shape", choices=SHAPES, default="small", help="of the random models")
    p.add_argument("--depths", type=measuring.parse_integers, default=[4, 12, 32], help="layers of the random models")
    p.add_argument("--model", help="a checkpoint instead")
    p.add_argument("--tokens", type=int, default=8, help="new tokens")
    p.add_argument("--loop", choices=LOOPS, help="of `generate` (default: its own choice)")
    args = p.parse_args(argv)
    before, cells = machine(), []
    for layers in [None] if args.model else args.depths:
        if args.model:
            model = kvjax.load(args.model)
        else:
            model = kvjax.random_model(SHAPES[args.shape].with_layers((0,) * layers))
        kvjax.generate(model, [PROMPT], "full", max_new_tokens=2)  # pays the costs of a process's first call
        for method in args.methods.split(";"):
            measuring.log_progress(f"{method}, {model.config.layers} layers")
            cells.append(measure(model, method.strip(), args.tokens, args.loop))
    title = f"compiling {args.model or args.shape}: one prompt of {len(PROMPT)} tokens, {args.tokens} new ones"
    title += f", loop {args.loop!r}" if args.loop else ""
    notes = ["Stages are sums over all programs of the cold run; the warm run reads its programs from the disk."]
    measuring.report("compile", before, [measuring.table(title, COLUMNS, map(row, cells))], notes, cells)


if __name__ == "__main__":
    main()
