"""Tables, plots and the JSON document of the eviction scripts."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from experiments.bench import measuring  # noqa: E402
from experiments.papers.eviction import WHEN, Measurements  # noqa: E402
from kvjax import Model  # noqa: E402

NAMES = {"first": "first question", "later": "later questions", "unseen": "unseen questions"}
LEGEND = (
    "First: the question ended the prompt that was compressed; later: the other questions, asked of the same cache; "
    "unseen: all questions, asked of the context compressed alone. Percent of answers that are right in every token, "
    "in brackets 95% intervals over contexts; after a comma the paired difference to the line's base. Bits of text: "
    "± a standard error."
)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a table: a method, the method that it is compared with, and the paper's cells."""

    label: str
    method: str
    base: str | None = None
    paper: tuple[Any, ...] = ()


def format_score(found: Measurements, line: Line, when: str, task: str | None = None) -> str | None:
    """Formats the score and the paired difference to the base: `81.2 (75–86), +1.2 (-1 to +4)`."""
    mean, _ = found.score(line.method, when, "right", task)
    interval = found.score_interval(line.method, when, task)
    if np.isnan(mean) or interval is None:
        return None
    out = f"{100 * mean:.1f} ({100 * interval.low:.0f}–{100 * interval.high:.0f})"
    if line.base:
        more, _ = found.gain(line.method, line.base, when, "right", task)
        interval = found.gain_interval(line.method, line.base, when, task)
        assert interval is not None  # scores have one
        out += f", {100 * more:+.1f} ({100 * interval.low:+.0f} to {100 * interval.high:+.0f})"
    return out


def format_text_bits(found: Measurements, line: Line) -> str | None:
    """Formats bits per token of text and the paired difference to the base."""
    mean, _ = found.score(line.method, "text", "nats")
    if np.isnan(mean):
        return None
    if not line.base:
        return f"{mean / np.log(2):.3f}"
    more, spread = (x / np.log(2) for x in found.gain(line.method, line.base, "text", "nats"))
    return f"{mean / np.log(2):.3f} ({more:+.3f} ±{spread:.3f})"


def quality_table(
    title: str, found: Measurements, lines: Sequence[Line], paper: Sequence[str] = (), task: str | None = None
) -> Table:
    """One row per method: the paper's figures, bytes on the device, and our scores over all tasks or one."""
    whens = [w for w in WHEN if found.tasks(w) and (task is None or task in found.tasks(w))]
    text = task is None and bool(found.tasks("text"))
    rows = []
    for line in lines:
        figures = [*line.paper, *[None] * (len(paper) - len(line.paper))]
        ours = [format_score(found, line, w, task) for w in whens] + ([format_text_bits(found, line)] if text else [])
        size = f"{found.bytes[line.method]['device'] / 1024:,.0f}"
        rows.append([line.label, *(None if x is None else f"{x:g}" for x in figures), size, *ours])
    columns = ["method", *paper, f"device KiB, {found.dtype}", *(NAMES[w] for w in whens)]
    columns += ["text, bits/token"] if text else []
    return measuring.table(title, columns, rows)


def document(
    name: str,
    args: argparse.Namespace,
    found: Measurements,
    lines: Sequence[Line],
    paper: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON document of a script: its settings, all outcomes, all lines with their gains, and `more`."""

    def describe(line: Line) -> dict[str, Any]:
        whens = [w for w in (*WHEN, "text") if found.tasks(w)]
        gains = {
            when: {field: found.gain(line.method, line.base, when, field) for field in ("right", "nats")}
            for when in (whens if line.base else ())
        }
        about = {"label": line.label, "method": line.method, "base": line.base}
        return about | {"paper": dict(zip(paper, line.paper, strict=False)), "gains": gains}

    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    described = [describe(line) for line in lines]
    return {"script": name, "settings": settings, "lines": described, "outcomes": found.records(), **(more or {})}


def report_lines(
    name: str,
    before: dict[str, Any],
    args: argparse.Namespace,
    found: Measurements,
    tables: Sequence[Table],
    notes: Sequence[str],
    **contents: Any,
) -> None:
    """Prints the report of a script with the legend; `contents` are the other arguments of `document`."""
    measuring.report(name, before, tables, [LEGEND, *notes], document(name, args, found, **contents))


def mean_score(results: Mapping[str, Any], method: str, when: str = "first") -> float:
    """Mean over the tasks of a JSON document: percent of right answers, or nats per token of text."""
    field, scale = ("nats", 1) if when == "text" else ("right", 100)
    found = [scale * o[field] for o in results["outcomes"] if (o["method"], o["when"]) == (method, when)]
    return float(np.mean(found)) if found else float("nan")


def describe_gains(results: Mapping[str, Any]) -> str:
    """Counts the lines with KVCrush that gain over their base, that gain clearly, and that lose clearly."""
    # Two standard errors of paired differences, without a correction for many pairs: some pass by chance.
    gains = [
        x["gains"]["first"]["right"] for x in results["lines"] if "kvcrush" in x["method"] and "first" in x["gains"]
    ]
    up, clear = (sum(mean > k * error for mean, error in gains) for k in (0, 2))
    down = sum(mean < -2 * error for mean, error in gains)
    return f"{up} of {len(gains)} pairs gain, {clear} clearly (two standard errors); {down} lose clearly"


def describe_scores(results: Mapping[str, Any]) -> str:
    """The scores of all lines in one sentence, and the gains of KVCrush where it was measured."""
    asked = {o["when"] for o in results["outcomes"]}
    whens = [when for when in WHEN[:2] if when in asked] or ["text"]
    scores = []
    for line in results["lines"]:
        cells = (f"{mean_score(results, line['method'], when):{'.3f' if when == 'text' else '.0f'}}" for when in whens)
        scores.append(f"{line['label'].strip()} {'/'.join(cells)}")
    text = f"{'/'.join(whens)} questions: " if whens != ["text"] else "text, nats per token: "
    crushed = any("kvcrush" in line["method"] for line in results["lines"])
    return text + ", ".join(scores) + (f"; KVCrush: {describe_gains(results)}" if crushed else "")


def signature_note(model: Model) -> str:
    """One sentence on the number of bits in KVCrush's signatures on this model."""
    n = model.config.kind(0).attention.heads
    return (
        f"This model has {n} query heads, so KVCrush compares tokens by {n} bits ({n + 1} distances to an anchor), "
        f"where the paper's Llama-3-8B has 32; a page's bits are its tokens' {n} bits side by side."
    )


def make_panels(path: Path, panels: int, share: bool = True) -> tuple[Any, Any]:
    """Makes a figure with a row of panels; returns it and its axes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig, axes = plt.subplots(1, panels, figsize=(4.5 * panels, 4), layout="constrained", squeeze=False, sharey=share)
    for ax in axes[0]:
        ax.grid(alpha=0.3)
    return fig, axes[0]


def save_panels(fig: Any, axes: Any, path: Path, columns: int = 3) -> str:
    """Writes the figure with one legend below; returns a note with its path."""
    handles = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    fig.savefig(path, dpi=130)
    plt.close(fig)
    return f"wrote {path}"


def draw_gain_bars(path: Path, found: Measurements, groups: Mapping[str, Sequence[Line]]) -> str:
    """Draws a panel per group: each line's gain over its base, by time of asking."""
    whens = [w for w in WHEN if found.tasks(w)] or ["text"]
    field, sign = ("right", 100) if whens != ["text"] else ("nats", -1)  # fewer nats are a gain
    fig, axes = make_panels(path, len(groups))
    for ax, (title, lines) in zip(axes, groups.items(), strict=True):
        for i, when in enumerate(whens):
            gains = [found.gain(line.method, line.base, when, field) for line in lines]
            at = np.arange(len(lines)) + 0.8 * (i - (len(whens) - 1) / 2) / len(whens)
            height, error = ([sign * g[j] for g in gains] for j in (0, 1))
            bars = {"width": 0.8 / len(whens), "yerr": np.abs(error), "capsize": 2}
            ax.bar(at, height, label=NAMES.get(when, when), **bars)
        ax.set_xticks(range(len(lines)), [line.label for line in lines], rotation=20, ha="right", fontsize=8)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_title(title, fontsize=10)
    axes[0].set_ylabel("gain in right answers, points" if field == "right" else "gain, nats per token")
    return save_panels(fig, axes, path)
