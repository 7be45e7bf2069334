"""A table of docs/results.md: selected methods at a quarter of the bytes in bfloat16, on a real model.

python -m experiments.equal_bytes_table    prints it

It reads the results of `python -m experiments.equal_bytes --settings experiments/readme.toml`; experiments/README.md
has the whole command.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.eval.page.summary import mean_error

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "readme.smollm2.json"
FULL = "full"
QUESTIONS = "turns.essays"  # later questions of a conversation, which come after the compression
NEEDLES = "niah.essays"
TEXT = "ppl"


class Point(NamedTuple):
    """Bytes and scores of a method."""

    method: str
    device: float  # percent of the exact cache's bytes, both in bfloat16
    host: float
    needles: tuple[float, float | None]  # percent right, and its standard error over contexts
    questions: tuple[float, float | None]
    question_gain: tuple[float, float | None]  # over the exact cache, in points, paired by context
    text_gain: tuple[float, float | None]  # bits per byte above the exact cache, paired


def read_points(document: Mapping[str, Any]) -> list[Point]:
    """Reads all methods of a document of `experiments.equal_bytes`, from the most bytes on the device to the fewest."""

    def scores(method: str, task: str) -> np.ndarray:
        by_seed = document["scores"][method][task]
        return np.concatenate([by_seed[seed] for seed in sorted(by_seed)])

    found = []
    for method in document["scores"]:
        device, host = (100 * fraction for fraction in document["bfloat16"][method])
        right = (mean_error(100 * scores(method, task)) for task in (NEEDLES, QUESTIONS))
        # Gains are paired by context, since some contexts are hard for the exact cache as well.
        gain = mean_error(100 * (scores(method, QUESTIONS) - scores(FULL, QUESTIONS)))
        text_gain = mean_error(scores(method, TEXT) - scores(FULL, TEXT))
        found.append(Point(method, device, host, *right, gain, text_gain))
    return sorted(found, key=lambda p: -p.device)


def table(points: Sequence[Point]) -> str:
    """Formats the table in Markdown."""
    lines = [
        "| method | device | host | needles | later questions | vs `full` | text, bits per byte |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]

    def cell(value: tuple[float, float | None], form: str) -> str:
        mean, error = value
        return format(mean, form) + ("" if error is None else f" ±{format(error, form).lstrip('+')}")

    for p in points:
        cells = (
            cell(p.needles, ".0f"),
            cell(p.questions, ".0f"),
            cell(p.question_gain, "+.0f"),
            cell(p.text_gain, "+.3f"),
        )
        lines.append(f"| `{p.method}` | {p.device:.1f}% | {p.host:.1f}% | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("results", type=Path, nargs="?", default=RESULTS, help="a document of experiments.equal_bytes")
    args = p.parse_args()
    print(table(read_points(json.loads(args.results.read_text()))))


if __name__ == "__main__":
    main()
