"""README's table and picture: eight methods on a real model, quality against bytes in bfloat16.

python -m experiments.readme_figure    prints the table, and writes docs/quality_against_bytes.png

It reads what `python -m experiments.equal_bytes --settings experiments/readme.toml` measured; experiments/README.md has
the whole command.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.eval.page.summary import mean_error
from kvjax.methods.strings import parts_given

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "readme.smollm2.json"
PICTURE = ROOT / "docs" / "quality_against_bytes.png"
FULL = "full"
QUESTIONS = "turns.essays"  # later questions of a conversation, which no method has seen when it compresses
NEEDLES = "niah.essays"
TEXT = "ppl"


class Point(NamedTuple):
    """What a method holds and answers."""

    method: str
    device: float  # percent of the exact cache's bytes, both in bfloat16
    host: float
    needles: tuple[float, float | None]  # percent right, and its standard error over contexts
    questions: tuple[float, float | None]
    text: tuple[float, float | None]  # bits per byte above the exact cache's, paired


def points(document: Mapping[str, Any]) -> list[Point]:
    """All methods of a document of `experiments.equal_bytes`, from the most bytes on the device to the fewest."""

    def scores(method: str, task: str) -> np.ndarray:
        by_seed = document["scores"][method][task]
        return np.concatenate([by_seed[seed] for seed in sorted(by_seed)])

    def point(method: str) -> Point:
        device, host = (100 * fraction for fraction in document["bfloat16"][method])
        right = (mean_error(100 * scores(method, task)) for task in (NEEDLES, QUESTIONS))
        return Point(method, device, host, *right, mean_error(scores(method, TEXT) - scores(FULL, TEXT)))

    found = [point(method) for method in document["scores"]]
    return sorted(found, key=lambda p: -p.device)


def table(found: Sequence[Point]) -> str:
    """For README, in Markdown."""
    lines = [
        "| method | device | host | needles | later questions | text, bits per byte |",
        "|---|---:|---:|---:|---:|---:|",
    ]

    def cell(value: tuple[float, float | None], form: str) -> str:
        mean, error = value
        return format(mean, form) + ("" if error is None else f" ±{format(error, form).lstrip('+')}")

    for p in found:
        cells = (cell(p.needles, ".0f"), cell(p.questions, ".0f"), cell(p.text, "+.3f"))
        lines.append(f"| `{p.method}` | {p.device:.1f}% | {p.host:.1f}% | {' | '.join(cells)} |")
    return "\n".join(lines)


def label(method: str) -> str:
    """A method's name with the parameter that says how much it holds, as a point of the picture is called."""
    sizes = ("budget", "bits", "k_bits")
    named = []
    for part in parts_given(method):
        size = next((part.values[name] for name in sizes if name in part.values), None)
        unit = "tokens" if "budget" in part.values else "bits"
        named.append(part.name if size is None else f"{part.name}, {size} {unit}")
    return " + ".join(named)


def draw(found: Sequence[Point], path: Path) -> None:
    """Answers against bytes on the device; points are named where they lie."""
    figure = Figure(figsize=(8.2, 4.4), layout="constrained")
    ax = figure.subplots()
    exact = next(p for p in found if p.method == FULL)
    ax.axhline(exact.questions[0], color="0.6", linewidth=0.8, zorder=0)
    for p in found:
        _point(ax, p)
    ax.set_xscale("log")
    ticks = (5, 10, 20, 30, 50, 100)
    ax.set_xticks(ticks, [f"{tick}%" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set(xlim=(5, 135), ylim=(-4, 104), yticks=range(0, 101, 20))
    ax.set_xlabel("bytes of the cache on the device, of the exact cache's, both in bfloat16 (logarithmic)")
    ax.set_ylabel("later questions answered right, %")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def _point(ax: Axes, p: Point) -> None:
    mean, error = p.questions
    on_host = p.host > 1
    color = "C1" if on_host else "C2" if "budget" in p.method else "C0"
    ax.errorbar(p.device, mean, error, color=color, marker="o", mfc="white" if on_host else color, capsize=2, lw=1)
    ax.annotate(label(p.method), (p.device, mean), xytext=(6, 5), textcoords="offset points", fontsize=8)


def main() -> None:
    """Prints the table and draws the picture."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("results", type=Path, nargs="?", default=RESULTS, help="what experiments.equal_bytes summed up")
    p.add_argument("--picture", type=Path, default=PICTURE, help="where the picture goes")
    args = p.parse_args()
    found = points(json.loads(args.results.read_text()))
    draw(found, args.picture)
    print(table(found))


if __name__ == "__main__":
    main()
