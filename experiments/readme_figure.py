"""README's picture and the table behind it: quality against bytes in bfloat16, on a real model.

python -m experiments.readme_figure    prints the table of docs/results.md, writes docs/quality_against_bytes.png

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
from kvjax.methods.strings import parts_given, parts_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "readme.smollm2.json"
PICTURE = ROOT / "docs" / "quality_against_bytes.png"
FULL = "full"
QUESTIONS = "turns.essays"  # later questions of a conversation, which no method has seen when it compresses
NEEDLES = "niah.essays"
TEXT = "ppl"
CLOSE = 1.2  # bytes of points whose names go into one column: less than so many times those of the next
LABEL_GAP = 4.5  # percent, between names


class Point(NamedTuple):
    """What a method holds and answers."""

    method: str
    device: float  # percent of the exact cache's bytes, both in bfloat16
    host: float
    needles: tuple[float, float | None]  # percent right, and its standard error over contexts
    questions: tuple[float, float | None]
    lost: tuple[float, float | None]  # questions beside the exact cache's, in points, paired by context
    text: tuple[float, float | None]  # bits per byte above the exact cache's, paired


def points(document: Mapping[str, Any]) -> list[Point]:
    """All methods of a document of `experiments.equal_bytes`, from the most bytes on the device to the fewest."""

    def scores(method: str, task: str) -> np.ndarray:
        by_seed = document["scores"][method][task]
        return np.concatenate([by_seed[seed] for seed in sorted(by_seed)])

    def point(method: str) -> Point:
        device, host = (100 * fraction for fraction in document["bfloat16"][method])
        right = (mean_error(100 * scores(method, task)) for task in (NEEDLES, QUESTIONS))
        lost = mean_error(100 * (scores(method, QUESTIONS) - scores(FULL, QUESTIONS)))
        return Point(method, device, host, *right, lost, mean_error(scores(method, TEXT) - scores(FULL, TEXT)))

    found = [point(method) for method in document["scores"]]
    return sorted(found, key=lambda p: -p.device)


def table(found: Sequence[Point]) -> str:
    """For docs/results.md, in Markdown."""
    lines = [
        "| method | device | host | needles | later questions | beside `full` | text, bits per byte |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]

    def cell(value: tuple[float, float | None], form: str) -> str:
        mean, error = value
        return format(mean, form) + ("" if error is None else f" ±{format(error, form).lstrip('+')}")

    for p in found:
        cells = (cell(p.needles, ".0f"), cell(p.questions, ".0f"), cell(p.lost, "+.0f"), cell(p.text, "+.3f"))
        lines.append(f"| `{p.method}` | {p.device:.1f}% | {p.host:.1f}% | {' | '.join(cells)} |")
    return "\n".join(lines)


def label(method: str) -> str:
    """A method's name with the parameter that says how much it holds, as a point of the picture is called."""
    sizes = ("budget", "bits", "k_bits")
    named = []
    for part, whole in zip(parts_given(method), parts_of(method), strict=True):
        size = next((part.values[name] for name in sizes if name in part.values), None)
        unit = "tokens" if "budget" in part.values else "bit" if size == 1 else "bits"
        level = whole.values.get("level", "head")
        ranked = "" if level == "head" else f", ranked over the {level}"
        named.append((part.name if size is None else f"{part.name}, {size} {unit}") + ranked)
    return " + ".join(named)


class Kind(NamedTuple):
    """What a method does to the cache, as points of one colour show it."""

    name: str
    color: str
    filled: bool


EXACT = Kind("the exact cache", "0.2", True)
BITS = Kind("all tokens, fewer bits", "C0", True)
TOKENS = Kind("fewer tokens", "C2", True)
HOST = Kind("exact tokens on the host", "C1", False)


def kind(p: Point) -> Kind:
    if p.method == FULL:
        return EXACT
    if p.host > 1:
        return HOST
    return TOKENS if "budget" in p.method else BITS


def columns(found: Sequence[Point]) -> list[list[Point]]:
    """Points whose names go into one column, because they hold nearly the same bytes; from the fewest bytes up."""
    groups: list[list[Point]] = []
    for p in sorted(found, key=lambda p: p.device):
        if groups and p.device < CLOSE * groups[-1][-1].device:
            groups[-1].append(p)
        else:
            groups.append([p])
    return groups


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights, moved up where one is closer to the one below than the gap."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    return moved


def draw(found: Sequence[Point], path: Path) -> None:
    """Answers against bytes on the device; every point has its method's name beside it."""
    figure = Figure(figsize=(8.2, 4.6), layout="constrained")
    ax = figure.subplots()
    exact = next(p for p in found if p.method == FULL)
    ax.axhline(exact.questions[0], color="0.6", linewidth=0.8, zorder=0)
    for column in columns(found):
        ends = min(p.device for p in column) / 1.07, 1.07 * max(p.device for p in column)
        # Names of methods that keep fewer tokens stand on the left, so that those of a column do not crowd.
        for end, on_left in zip(ends, (True, False), strict=True):
            named = sorted((p for p in column if (kind(p) is TOKENS) == on_left), key=lambda p: p.questions[0])
            for p, height in zip(named, apart([p.questions[0] for p in named], LABEL_GAP), strict=True):
                _point(ax, p, (end, height), "right" if on_left else "left")
    ax.set_xscale("log")
    ticks = (5, 10, 20, 30, 50, 100)
    ax.set_xticks(ticks, [f"{tick}%" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set(xlim=(5, 135), ylim=(-3, 100), yticks=range(0, 101, 20))
    ax.set_xlabel("bytes of the cache on the device, percent of the exact cache's, both in bfloat16 (logarithmic)")
    ax.set_ylabel("later questions answered right, %")
    ax.set_title("SmolLM2-135M, 1,024 tokens of essays; bars are standard errors over 24 contexts", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    for k in (EXACT, BITS, TOKENS, HOST):
        ax.plot([], [], "o", color=k.color, mfc=k.color if k.filled else "white", label=k.name)
    ax.legend(loc="lower right", fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _point(ax: Axes, p: Point, beside: tuple[float, float], align: str) -> None:
    """A point with its error, and its method's name at a place beside it; `align` is the end of the name there."""
    mean, error = p.questions
    color, filled = kind(p).color, kind(p).filled
    ax.errorbar(p.device, mean, error, color=color, marker="o", mfc=color if filled else "white", capsize=2, lw=1)
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    line = {"arrowstyle": "-", "color": "0.7", "lw": 0.6, "shrinkA": 0, "shrinkB": 4}
    ax.annotate(
        label(p.method), (p.device, mean), beside, fontsize=8, ha=align, va="center", arrowprops=line, bbox=white
    )


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
