"""The planner's decode speed on this machine beside the measured one: shapes x methods, and what each step is spent on.

python -m experiments.bench.plan [--models small,125m] [--contexts 8192,2048] [--methods "full; int8; quest:budget=512"]

The loops hold random keys and values. They and the probes of `kvjax plan --measured` take turns, so that other work on
the machine slows both. It slows a long turn more than a short probe: on a busy machine the best turns tell more.
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
from kvjax.planning import measurement
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
) -> tuple[dict[str, Any], dict[str, Hardware]]:
    """Times the decode loops of all methods, and the probes of the machine, in turns.

    Returns:
      A cell with the summarized seconds of a step by method, and the machine in the same turns, by medians and at best.
    """
    model = kvjax.random_model(dataclasses.replace(SHAPES[name], max_positions=2 * context))
    measuring.log_progress(describe(name, model.config, model.params))
    room = args.steps * (args.repeats + 1)
    loops = {method: random_loop(model, method, 1, context, room) for method in methods}
    for method, loop in loops.items():
        loop.decode(args.steps)
        measuring.log_progress(f"{method} is compiled")
    probes = measurement.Probes("float32", args.megabytes, args.tokens, args.repeats)
    seconds = time_decode_steps(loops, args.steps, args.repeats, probes.runs)
    jax.clear_caches()
    steps = {method: measuring.summary(seconds[method]) for method in methods}
    rates = {"median": probes.hardware(seconds), "best": probes.hardware(seconds, min)}
    return {"model": name, "context": context, "room": room, "seconds": steps}, rates


def compare(cell: dict[str, Any], rates: dict[str, Hardware]) -> list[dict[str, Any]]:
    """The planner's step beside the measured one, by medians and by the best turns: a record for each method."""
    config = dataclasses.replace(SHAPES[cell["model"]], max_positions=2 * cell["context"])
    model, found = PlannedModel(cell["model"], config, "experiments.bench.shapes"), []
    for method, seconds in cell["seconds"].items():
        record = {"model": cell["model"], "context": cell["context"], "method": method, "measured": seconds}
        for kind, hardware in rates.items():
            setting = Setting(model, hardware, (1, 1), "float32", cell["room"], None, RESERVED)
            speed: Speed = estimate_step(setting, kvjax.parse(method), cell["context"], 1)
            parts = dataclasses.asdict(speed) | {"step": speed.step}
            record[kind] = {"planned": parts, "off": seconds[kind] / speed.step - 1}
        found.append(record)
    return found


def row(r: dict[str, Any]) -> list[Any]:
    """Formats a record: milliseconds, and by how much the planned speed is off."""
    cells = [r["model"], f"{r['context']:,}", r["method"]]
    for kind in ("median", "best"):
        planned, off = r[kind]["planned"], r[kind]["off"]
        cells += [f"{1e3 * r['measured'][kind]:.2f}", f"{1e3 * planned['step']:.2f}", f"{off:+.0%}"]
    parts = ("weights", "cache", "compute", "host_link", "launches", "search")
    return [*cells, *(f"{1e3 * r['best']['planned'][part]:.2f}" for part in parts)]


COLUMNS = ("model", "context", "method", "median ms", "planned", "off by", "best ms", "planned", "off by")
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
    records = [r for cell, rates in cells for r in compare(cell, rates)]
    table = measuring.table("Planned and measured decode steps, milliseconds", COLUMNS, [row(r) for r in records])
    notes = [
        f"by {kind}, planned speed within {TOLERANCE:.0%} of the measured one: "
        f"{sum(abs(r[kind]['off']) <= TOLERANCE for r in records)} of {len(records)}"
        for kind in ("median", "best")
    ]
    for cell, rates in cells:
        for kind, hardware in rates.items():
            figures = ", ".join(f"{name} {getattr(hardware, name):.3g}" for name in RATES)
            notes.append(f"{cell['model']}, {kind}: {figures}")
    results = {
        "records": records,
        "rates": [{k: dataclasses.asdict(h) for k, h in rates.items()} for _, rates in cells],
    }
    measuring.report("plan", before, [table], notes, results)


if __name__ == "__main__":
    main()
