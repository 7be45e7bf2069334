"""Recall against budget for all eviction methods, with and without KVCrush, and for methods that offload.

python -m experiments.papers.eviction_curves [--budgets 64,128,256,512] [--methods snapkv,h2o] [--out out]

The budget of an eviction method is the number of tokens that a head keeps of the context. An offload method loses
nothing; its budget is the number of tokens that a step fetches from the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

import kvjax
from experiments.axes import limit_percents
from experiments.bench.measuring import machine, parse_integers, table
from experiments.papers import common
from experiments.papers.eviction import WHEN, Measurements, eviction_parser, measure
from experiments.papers.eviction_tables import (
    NAMES,
    Line,
    describe_scores,
    format_score,
    make_panels,
    report_lines,
    save_panels,
    signature_note,
)
from kvjax import KvjaxError


def infllm(budget: int) -> str:
    """Divides the budget among sinks, blocks and window, about as in the authors' configuration."""
    # Blocks of 16 tokens: one of the authors' 128 would be more than the smallest budgets.
    sinks, topk = budget // 16, max(3 * budget // 128, 1)
    local = budget - sinks - 16 * topk
    return f"infllm:block=16,sinks={sinks},local={local},topk={topk},chunk={min(64, local)}"


METHODS: dict[str, Callable[[int], str]] = {
    "snapkv": lambda b: f"snapkv:budget={b}",
    "pyramidkv": lambda b: f"pyramidkv:budget={b}",
    "accumulated": lambda b: f"accumulated:budget={b}",
    "keynorm": lambda b: f"keynorm:budget={b}",
    "random": lambda b: f"random:budget={b}",
    "sinks_and_recent": lambda b: f"sinks_and_recent:budget={b}",
    "h2o": lambda b: f"h2o:heavy={b // 2},recent={b - b // 2}",
    "scissorhands": lambda b: f"scissorhands:budget={b}",
    "streaming_llm": lambda b: f"streaming_llm:recent={b - 4}",
    "infllm": infllm,
    "kcache": lambda b: f"kcache:n={b}",
    "specache": lambda b: f"specache:topk={b}",
}
# The others evict while they decode, keep what their place says, or lose nothing: no budget that KVCrush could share.
CRUSHED = ("snapkv", "pyramidkv", "accumulated", "keynorm", "random")
OFFLOAD = ("infllm", "kcache", "specache")


@dataclasses.dataclass(frozen=True)
class Curve:
    """A method at all budgets."""

    name: str
    lines: tuple[Line, ...]

    @property
    def label(self) -> str:
        """Name in tables and plots."""
        return self.name + (" + kvcrush" if self.lines[0].base else "")


def curves(names: Sequence[str], budgets: Sequence[int], share: float) -> list[Curve]:
    """Each method alone and, if it has a budget that KVCrush can share, with KVCrush."""
    found = []
    for name in names:
        if name not in METHODS:
            raise KvjaxError(f"unknown method {name!r}; use {', '.join(METHODS)}")
        alone = [METHODS[name](b) for b in budgets]
        found.append(Curve(name, tuple(Line(f"{name} {b}", m) for b, m in zip(budgets, alone, strict=True))))
        if name in CRUSHED:
            crush = [f"{m} + kvcrush:share={share}" for m in alone]
            pairs = zip(budgets, crush, alone, strict=True)
            found.append(Curve(name, tuple(Line(f"{name} + kvcrush {b}", m, base) for b, m, base in pairs)))
    return found


def later_loss(found: Measurements, method: str) -> tuple[float, float]:
    """Loss from the first to the later questions, minus the same loss under `full`: (mean, standard error)."""

    def loss(name: str) -> np.ndarray:
        first, later = (
            np.concatenate([found.outcomes[name, task, when].right.mean(1) for task in found.tasks("first")])
            for when in WHEN[:2]
        )
        return first - later

    # Later questions follow another answer, which makes them harder or easier under `full` as well.
    x = loss(method) - loss("full")
    return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else float("nan")


def tables(found: Measurements, every: Sequence[Curve], budgets: Sequence[int], length: int) -> list[Table]:
    """A table of methods by budgets for each time of asking, and one of the later questions' loss."""
    columns = ["method", *map(str, budgets)]
    made = []
    for when in [w for w in (*WHEN, "text") if found.tasks(w)]:

        def format_cell(method: str, when=when) -> str:
            if when != "text":
                return format_score(found, Line(method, method), when) or "-"
            mean, error = found.score(method, when, "nats")
            return f"{mean:.3f} ±{error:.3f}"

        rows = [("full", *[format_cell("full")] * len(budgets))]
        rows += [(c.label, *(format_cell(line.method) for line in c.lines)) for c in every]
        title = "text, nats per token" if when == "text" else f"{NAMES[when]}, % right"
        made.append(table(f"{title}, by budget; contexts of {length} tokens", columns, rows))
    if found.tasks("first") and found.tasks("later"):
        losses = [(c.label, *(later_loss(found, line.method) for line in c.lines)) for c in every]
        rows = [(label, *(f"{100 * m:+.1f} ±{100 * s:.1f}" for m, s in x)) for label, *x in losses]
        made.append(table("lost from the first to the later questions, points beyond what full loses", columns, rows))
    return made


def plot(path: Path, found: Measurements, every: Sequence[Curve], budgets: Sequence[int]) -> str:
    """Draws a panel per time of asking; dashed lines have KVCrush, stars mark methods that offload."""
    whens = [w for w in WHEN if found.tasks(w)] or ["text"]
    field, scale = ("nats", 1) if whens == ["text"] else ("right", 100)
    fig, axes = make_panels(path, len(whens))
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(c.name for c in every))}
    for ax, when in zip(axes, whens, strict=True):
        for c in every:
            y = scale * np.array([found.score(line.method, when, field) for line in c.lines])
            style = "--" if c.lines[0].base else "-"
            marker = {"marker": "*" if c.name in OFFLOAD else "o", "markersize": 7 if c.name in OFFLOAD else 4}
            at = {"color": colors[c.name], "linestyle": style, "label": c.label, "capsize": 2, "elinewidth": 0.8}
            ax.errorbar(budgets, y[:, 0], y[:, 1], **at, **marker)
        ax.axhline(scale * found.score("full", when, field)[0], color="black", linewidth=0.8, label="full")
        ax.set_xscale("log", base=2)
        ax.set_xticks(budgets, list(map(str, budgets)))
        ax.set(xlabel="budget, tokens (logarithmic)", title=NAMES.get(when, when))
    if field == "right":
        limit_percents(axes[0])  # the panels share this axis
    axes[0].set_ylabel("right answers, %" if field == "right" else "nats per token")
    return save_panels(fig, axes, path, 6)


def main(argv: Sequence[str] | None = None) -> None:
    parser = eviction_parser(__doc__, tasks=["phrases"], contexts=16)
    parser.add_argument("--budgets", type=parse_integers, default="64,128,256,512")
    parser.add_argument(
        "--methods", type=common.split_words, default=",".join(METHODS), help="from: " + ", ".join(METHODS)
    )
    parser.add_argument("--share", type=float, default=0.25, help="of the budget, for KVCrush")
    args = parser.parse_args(argv)
    before, model = machine(), kvjax.load(args.model)
    every = curves(args.methods, args.budgets, args.share)
    every_line = [line for c in every for line in c.lines]
    found = measure(model, args, ["full", *(line.method for line in every_line)])
    notes = [
        f"Budgets are tokens of {args.length}; for kcache and specache tokens fetched per step: they lose nothing, as "
        "kcache stores all keys on the device, specache a one-bit copy of all. infllm keeps its blocks in host memory. "
        "Sinks, windows and recents count as budget, and kvcrush gets its share of the rest.",
        signature_note(model),
        plot(args.out / "eviction_curves.png", found, every, args.budgets),
    ]
    drops = {line.method: later_loss(found, line.method) for line in every_line} if found.tasks("first") else {}
    every_table = tables(found, every, args.budgets, args.length)
    report_lines("eviction_curves", before, args, found, every_table, notes, lines=every_line, more={"drop": drops})


def describe_largest(results: Mapping[str, Any]) -> str:
    """The scores at the largest budget in one sentence."""
    budget = max((line["label"].split()[-1] for line in results["lines"]), key=int)
    return describe_scores(results | {"lines": [x for x in results["lines"] if x["label"].split()[-1] == budget]})


in_brief = common.brief(describe_largest, "no such figure", "Evicted tokens are missing for later questions.")

if __name__ == "__main__":
    common.run_script(main)
