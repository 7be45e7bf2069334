"""Measures quality and bytes of every method on the shipped model, for the methods' pages.

python -m experiments.methods            measures every method that experiments/results/methods.json lacks
python -m experiments.methods --again    measures all of them
python -m experiments.methods --speed    measures the decode speed of all; needs an idle machine
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from rich.progress import track

from experiments.bench.measuring import make_parser
from kvjax import demo, load
from kvjax.cli import use_compilation_cache
from kvjax.eval.run.harness import SPEED_RUNS
from kvjax.generation.generate import generate
from kvjax.registry.loading import load_all

RESULTS = Path(__file__).parent / "results" / "methods.json"


def read_results() -> dict[str, dict[str, Any]]:
    """Reads the stored measurements, by method string."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def measure(remeasure: bool = False) -> None:
    """Measures the methods without stored results, or all, on the same contexts as `full`."""
    found = {} if remeasure else read_results()
    missing = [r.example for r in load_all().values() if r.example not in found]
    exam = demo.make_benchmark(load("testbed"), full=True)
    for row in demo.measure(exam, tuple(dict.fromkeys(["full", *missing]))):
        result = dataclasses.asdict(row)
        del result["tokens_per_second"]  # other work on the machine disturbs it; `measure_speed` takes turns
        found.setdefault(row.method, result)  # `full` is measured in every run; its first result stays
        _write(found)  # after every method, so that an interrupted run loses nothing


def measure_speed() -> None:
    """Measures the decode speed of each method over that of `full`, both in turns."""
    found, exam = read_results(), demo.make_benchmark(load("testbed"), full=True)

    # The loop is one program: dispatched layer by layer, this small model would measure Python.
    def rate(method: str) -> float:
        contexts = [case.context for case in exam.questions]
        options = {"max_new_tokens": 64, "eos_ids": (), "loop": "while"}
        return generate(exam.model, contexts, method, **options).tokens_per_second

    for method, row in track(found.items(), "methods", transient=True):
        # A ratio of neighbors in time, and the median of several: load of the machine falls on both sides alike.
        row["speed"] = statistics.median(rate(method) / rate("full") for _ in range(SPEED_RUNS))
        _write(found)


def _write(found: dict[str, dict[str, Any]]) -> None:
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("--again", action="store_true", help="measure all methods, not only the missing ones")
    p.add_argument("--speed", action="store_true", help="measure the decode speed only")
    args = p.parse_args()
    use_compilation_cache()
    if args.speed:
        measure_speed()
    else:
        measure(args.again)


if __name__ == "__main__":
    main()
