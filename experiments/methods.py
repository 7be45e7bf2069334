"""What every method keeps and costs on the shipped model: the numbers on the methods' pages.

python -m experiments.methods            measures every method that experiments/results/methods.json lacks
python -m experiments.methods --again    measures all of them
python -m experiments.methods --speed    measures the speed of all; on a machine without other work
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from rich.progress import track

from kvjax import demo, load
from kvjax.cli import use_compilation_cache
from kvjax.eval.run.harness import SPEED_RUNS
from kvjax.generation.generate import generate
from kvjax.methods.registry import load_all

MEASURED = Path(__file__).parent / "results" / "methods.json"


def measured() -> dict[str, dict[str, Any]]:
    """What was measured, by method string."""
    return json.loads(MEASURED.read_text()) if MEASURED.exists() else {}


def measure(again: bool = False) -> None:
    """Adds what is missing to what was measured; every method on the same contexts, beside `full`."""
    found = {} if again else measured()
    missing = [r.example for r in load_all().values() if r.example not in found]
    asked = demo.make_benchmark(load("testbed"), full=True)
    for row in demo.measure(asked, tuple(dict.fromkeys(["full", *missing]))):
        kept = dataclasses.asdict(row)
        del kept["tokens_per_second"]  # what else the machine does changes it: see `measure_speed`
        found.setdefault(row.method, kept)  # `full`, beside which all are measured, stays
        _write(found)  # what is done stays if the run is stopped


def measure_speed() -> None:
    """Adds to each method how many times as fast as `full` it decodes, both in turns."""
    found, asked = measured(), demo.make_benchmark(load("testbed"), full=True)

    def rate(method: str) -> float:
        contexts = [case.context for case in asked.questions]
        how = {"max_new_tokens": 64, "eos_ids": (), "loop": "while"}
        return generate(asked.model, contexts, method, **how).tokens_per_second

    for method, row in track(found.items(), "methods", transient=True):
        row["speed"] = statistics.median(rate(method) / rate("full") for _ in range(SPEED_RUNS))
        _write(found)


def _write(found: dict[str, dict[str, Any]]) -> None:
    MEASURED.write_text(json.dumps(found, indent=2) + "\n")


def main() -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--again", action="store_true", help="all methods, and not only those that are missing")
    p.add_argument("--speed", action="store_true", help="how fast they decode, and nothing else")
    args = p.parse_args()
    use_compilation_cache()
    if args.speed:
        measure_speed()
    else:
        measure(args.again)


if __name__ == "__main__":
    main()
