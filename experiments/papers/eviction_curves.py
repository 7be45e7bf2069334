"""Recall against budget for all eviction methods, with and without KVCrush, beside methods that offload.

python -m experiments.papers.eviction_curves [--budgets 64,128,256,512] [--methods snapkv,h2o] [--out out]

An eviction method's budget is the tokens that it keeps of the context per layer and head; of an offload method, which
loses nothing, it is the rows that a step fetches from the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

import kvjax
from experiments.bench.common import integers, machine, report, table
from experiments.papers import common
from experiments.papers.eviction import WHEN, Found, arguments, measure
from experiments.papers.eviction_tables import (
    EXPLAINED,
    NAMES,
    Line,
    average,
    document,
    figure,
    save,
    signature_note,
)
from kvjax import KvjaxError
from kvjax.eval.page.charts import set_percent_axis


def infllm(budget: int) -> str:
    """Sinks, blocks and window that make up the budget, divided about as in its authors' configuration."""
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
CRUSHED = ("snapkv", "pyramidkv", "accumulated", "keynorm", "random")
OFFLOAD = ("infllm", "kcache", "specache")


@dataclasses.dataclass(frozen=True)
class Curve:
    """A method at all budgets."""

    name: str
    lines: tuple[Line, ...]

    @property
    def label(self) -> str:
        """As tables and plots call it."""
        return self.name + (" + kvcrush" if self.lines[0].base else "")


def curves(names: Sequence[str], budgets: Sequence[int], share: float) -> list[Curve]:
    """Each method, and where it has a budget to share, with KVCrush behind it."""
    out = []
    for name in names:
        if name not in METHODS:
            raise KvjaxError(f"unknown method {name!r}; use {', '.join(METHODS)}")
        alone = [METHODS[name](b) for b in budgets]
        out.append(Curve(name, tuple(Line(f"{name} {b}", m) for b, m in zip(budgets, alone, strict=True))))
        if name in CRUSHED:
            crush = [f"{m} + kvcrush:share={share}" for m in alone]
            pairs = zip(budgets, crush, alone, strict=True)
            out.append(Curve(name, tuple(Line(f"{name} + kvcrush {b}", m, base) for b, m, base in pairs)))
    return out


def drop(found: Found, method: str) -> tuple[float, float]:
    """What the later questions lose beside the first, beyond what they lose under `full`: (mean, standard error)."""

    def lost(m):
        first, later = (np.concatenate([_means(found, m, t, w) for t in found.tasks("first")]) for w in WHEN[:2])
        return first - later

    x = lost(method) - lost("full")
    return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else float("nan")


def _means(found: Found, method: str, task: str, when: str) -> np.ndarray:
    return found.outcomes[method, task, when].right.mean(1)


def tables(found: Found, every: Sequence[Curve], budgets: Sequence[int], length: int) -> list[Table]:
    """For each time of asking a table: methods down, budgets across; and what the later questions lose."""
    columns = ["method", *map(str, budgets)]
    out = []
    for when in [w for w in (*WHEN, "text") if found.tasks(w)]:
        field, scale, digits = ("nats", 1, 3) if when == "text" else ("right", 100, 1)

        def shown(method, when=when, field=field, scale=scale, digits=digits):
            mean, error = found.score(method, when, field)
            return f"{scale * mean:.{digits}f} ±{scale * error:.{digits}f}"

        rows = [("full", *[shown("full")] * len(budgets))]
        rows += [(c.label, *(shown(line.method) for line in c.lines)) for c in every]
        title = "text, nats per token" if when == "text" else f"{NAMES[when]}, % right"
        out.append(table(f"{title}, by budget; contexts of {length} tokens", columns, rows))
    if found.tasks("first") and found.tasks("later"):
        losses = [(c.label, *(drop(found, line.method) for line in c.lines)) for c in every]
        rows = [(label, *(f"{100 * m:+.1f} ±{100 * s:.1f}" for m, s in x)) for label, *x in losses]
        out.append(table("lost from the first to the later questions, points beyond what full loses", columns, rows))
    return out


def plot(path: Path, found: Found, every: Sequence[Curve], budgets: Sequence[int]) -> str:
    """A panel per time of asking; dashed: with KVCrush; stars: methods that offload."""
    whens = [w for w in WHEN if found.tasks(w)] or ["text"]
    field, scale = ("nats", 1) if whens == ["text"] else ("right", 100)
    fig, axes = figure(path, len(whens))
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
        set_percent_axis(axes[0].yaxis, 100)  # of all panels, which share it
    axes[0].set_ylabel("right answers, %" if field == "right" else "nats per token")
    return save(fig, axes, path, 6)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, tasks=["phrases"], contexts=16)
    parser.add_argument("--budgets", type=integers, default="64,128,256,512")
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
        EXPLAINED,
        f"Budgets are tokens of {args.length}; for kcache and specache rows fetched per step: they lose nothing, as "
        "kcache holds all keys on the device, specache a one-bit copy of all. infllm keeps its blocks in host memory. "
        "Sinks, windows and recents count as budget, and kvcrush gets its share of what they leave.",
        signature_note(model),
        plot(args.out / "eviction_curves.png", found, every, args.budgets),
    ]
    drops = {line.method: drop(found, line.method) for line in every_line} if found.tasks("first") else {}
    results = document("eviction_curves", args, found, every_line, more={"drop": drops})
    report("eviction_curves", before, tables(found, every, args.budgets, args.length), notes, results)


def in_brief(results: Mapping[str, Any]) -> tuple[str, str, str]:
    """(ours, the paper's, the difference) for the table of all scripts."""
    budget = max(int(line["label"].split()[-1]) for line in results["lines"])
    last = [x for x in results["lines"] if int(x["label"].split()[-1]) == budget]

    def score(x, when) -> str:
        return f"{average(results, x['method'], when):.0f}"

    shown = [f"{x['label']} {score(x, 'first')}/{score(x, 'later')}" for x in last]
    lost = {x["label"].split()[0]: results["drop"].get(x["method"], (float("nan"),))[0] for x in last}
    evict, keep = ([v for k, v in lost.items() if (k in OFFLOAD) == side] for side in (False, True))

    def mean(x) -> str:
        return f"{100 * np.mean(x):+.1f}" if x else "not measured"

    return (
        f"first/later questions at {budget}: " + ", ".join(shown),
        "no such figure",
        f"Points lost from the first to later questions: eviction {mean(evict)}, offload {mean(keep)}.",
    )


if __name__ == "__main__":
    common.run(main)
