"""The planner's decode speed on this machine beside the measured one: shapes x methods, and what each step is spent on.

python -m experiments.bench.plan [--models small,125m] [--contexts 8192,2048] [--methods "full; int8; quest:budget=512"]

The loops hold random keys and values. They and the probes of `kvjax plan --measured` take turns, so that other work on
the machine slows both alike; medians count.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

import kvjax
from experiments.bench import measuring
from experiments.bench.decoders import random_loop, time_decode_steps
from experiments.bench.shapes import SHAPES, describe
from kvjax.eval.run.machine import machine
from kvjax.planning import measured
from kvjax.planning.hardware import Hardware
from kvjax.planning.models import PlannedModel
from kvjax.planning.plan import RESERVED, Setting, Speed, estimate_step
from kvjax.registry.strings import split_list

METHODS = "full; int8; kivi:bits=4,group=32; quest:budget=512; kcache:n=64"
RATES = (
    "memory_bandwidth",
    "cache_bandwidth",
    "flops",
    "host_link",
    "layer_seconds",
    "decoded_values",
    "ranked_values",
)
TOLERANCE = 0.3  # of the measured speed


def measure(
    name: str, context: int, methods: Sequence[str], args: argparse.Namespace
) -> tuple[dict[str, Any], Hardware]:
    """Times the decode loops of all methods, and the probes of the machine, in turns.

    Returns:
      A cell with the summarized seconds of a step by method, and the machine as it was in the same turns.
    """
    model = kvjax.random_model(dataclasses.replace(SHAPES[name], max_positions=2 * context))
    measuring.log_progress(describe(name, model.config, model.params))
    room = args.steps * (args.repeats + 1)
    loops = {method: random_loop(model, method, 1, context, room) for method in methods}
    for method, loop in loops.items():
        loop.decode(args.steps)
        measuring.log_progress(f"{method} is compiled")
    probes = measured.Probes("float32", args.megabytes, args.tokens, args.repeats)
    seconds = time_decode_steps(loops, args.steps, args.repeats, probes.runs)
    jax.clear_caches()
    steps = {method: measuring.summary(seconds[method]) for method in methods}
    return {"model": name, "context": context, "room": room, "seconds": steps}, probes.hardware(seconds)


def compare(cell: dict[str, Any], hardware: Hardware) -> list[dict[str, Any]]:
    """The planner's step beside the measured one, a record for each method."""
    config = dataclasses.replace(SHAPES[cell["model"]], max_positions=2 * cell["context"])
    model = PlannedModel(cell["model"], config, "experiments.bench.shapes")
    setting = Setting(model, hardware, (1, 1), "float32", cell["room"], None, RESERVED)
    found = []
    for method, seconds in cell["seconds"].items():
        speed: Speed = estimate_step(setting, kvjax.parse(method), cell["context"], 1)
        about = {"model": cell["model"], "context": cell["context"], "method": method, "measured": seconds}
        ratio = seconds["median"] / speed.step  # planned tokens per second over measured ones is its inverse
        found.append({**about, "planned": dataclasses.asdict(speed), "planned_step": speed.step, "ratio": ratio})
    return found


def row(r: dict[str, Any]) -> list[Any]:
    """Formats a record: milliseconds."""
    parts = ("weights", "cache", "compute", "host_link", "launches", "search")
    times = [r["planned_step"], r["measured"]["median"], r["measured"]["best"], *(r["planned"][part] for part in parts)]
    figures = [f"{1e3 * x:.2f}" for x in times]
    return [r["model"], f"{r['context']:,}", r["method"], *figures[:3], f"{r['ratio'] - 1:+.0%}", *figures[3:]]


COLUMNS = ("model", "context", "method", "planned ms", "measured", "best", "slower by")
COLUMNS += ("weights", "cache", "compute", "link", "layers", "search")


def main(argv: Sequence[str] | None = None) -> None:
    p = measuring.make_parser(__doc__)
    p.add_argument("--models", default="small,125m", help=", ".join(SHAPES))
    p.add_argument("--contexts", type=measuring.parse_integers, default=[8192, 2048], help="one for each model")
    p.add_argument("--methods", type=split_list, default=split_list(METHODS))
    p.add_argument("--steps", type=int, default=16, help="tokens per turn")
    p.add_argument("--repeats", type=int, default=7, help="turns; the median counts")
    p.add_argument("--megabytes", type=int, default=256, help="read to measure the bandwidth")
    p.add_argument("--tokens", type=int, default=8192, help="of the quantized cache that measures decoding")
    args = p.parse_args(argv)
    before = machine()
    cells = [
        measure(name, context, args.methods, args)
        for name, context in zip(args.models.split(","), args.contexts, strict=True)
    ]
    records = [r for cell, hardware in cells for r in compare(cell, hardware)]
    within = sum(abs(1 / r["ratio"] - 1) <= TOLERANCE for r in records)
    table = measuring.table("Planned and measured decode steps, milliseconds", COLUMNS, [row(r) for r in records])
    notes = [f"planned speed within {TOLERANCE:.0%} of the measured one: {within} of {len(records)}"]
    for cell, hardware in cells:
        notes.append(f"{cell['model']}: " + ", ".join(f"{name} {getattr(hardware, name):.3g}" for name in RATES))
    results = {"records": records, "rates": [dataclasses.asdict(hardware) for _, hardware in cells]}
    measuring.report("plan", before, [table], notes, results)


if __name__ == "__main__":
    main()
