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
from experiments.papers.eviction import WHEN, Found  # noqa: E402
from kvjax import Model  # noqa: E402

NAMES = {"first": "first question", "later": "later questions", "unseen": "unseen questions"}
EXPLAINED = (
    "First: the question ended the prompt that was compressed; later: the other questions, asked of that same state; "
    "unseen: all questions, the context having been compressed alone. Share of answers that are right in every token, "
    "in percent, ± one standard error over contexts; in brackets the paired difference to the line's base."
)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a table: the method, what it is compared with, and the paper's cells."""

    label: str
    method: str
    base: str | None = None
    paper: tuple[Any, ...] = ()


def cell(found: Found, line: Line, when: str, task: str | None = None) -> str | None:
    """`81.2 ±1.9 (+1.2 ±0.9)`: the score, and the paired difference to the base."""
    mean, error = found.score(line.method, when, "right", task)
    if np.isnan(mean):
        return None
    out = f"{100 * mean:.1f} ±{100 * error:.1f}"
    if line.base:
        more, spread = found.gain(line.method, line.base, when, "right", task)
        out += f" ({100 * more:+.1f} ±{100 * spread:.1f})"
    return out


def text_cell(found: Found, line: Line) -> str | None:
    """Bits per token of text, and the paired difference to the base."""
    mean, _ = found.score(line.method, "text", "nats")
    if np.isnan(mean):
        return None
    if not line.base:
        return f"{mean / np.log(2):.3f}"
    more, spread = (x / np.log(2) for x in found.gain(line.method, line.base, "text", "nats"))
    return f"{mean / np.log(2):.3f} ({more:+.3f} ±{spread:.3f})"


def quality(
    title: str, found: Found, lines: Sequence[Line], paper: Sequence[str] = (), task: str | None = None
) -> Table:
    """One line per method: the paper's figures, bytes on the device, then ours: all tasks alike, or one of them."""
    whens = [w for w in WHEN if found.tasks(w) and (task is None or task in found.tasks(w))]
    text = task is None and bool(found.tasks("text"))
    rows = []
    for line in lines:
        figures = [*line.paper, *[None] * (len(paper) - len(line.paper))]
        ours = [cell(found, line, w, task) for w in whens] + ([text_cell(found, line)] if text else [])
        size = f"{found.bytes[line.method]['device'] / 1024:,.0f}"
        rows.append([line.label, *(None if x is None else f"{x:g}" for x in figures), size, *ours])
    columns = [
        "method",
        *paper,
        f"device KiB, {found.dtype}",
        *(NAMES[w] for w in whens),
        *(["text, bits/token"] if text else []),
    ]
    return measuring.table(title, columns, rows)


def document(
    name: str,
    args: argparse.Namespace,
    found: Found,
    lines: Sequence[Line],
    paper: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a script prints as JSON: its settings, all outcomes, all lines with their gains."""

    def described(line):
        whens = [w for w in (*WHEN, "text") if found.tasks(w)]
        gains = {
            when: {field: found.gain(line.method, line.base, when, field) for field in ("right", "nats")}
            for when in (whens if line.base else ())
        }
        return {
            "label": line.label,
            "method": line.method,
            "base": line.base,
            "paper": dict(zip(paper, line.paper, strict=False)),
            "gains": gains,
        }

    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    lines = [described(line) for line in lines]
    return {"script": name, "settings": settings, "lines": lines, "outcomes": found.records(), **(more or {})}


def average(results: Mapping[str, Any], method: str, when: str = "first") -> float:
    """Of a script's JSON document: the mean over tasks of the share right, in percent (text: nats per token)."""
    field, scale = ("nats", 1) if when == "text" else ("right", 100)
    found = [scale * o[field] for o in results["outcomes"] if (o["method"], o["when"]) == (method, when)]
    return float(np.mean(found)) if found else float("nan")


def gained(line: Mapping[str, Any], when: str = "first") -> tuple[float, float]:
    """A line's gain over its base, and its standard error, in points."""
    mean, error = line["gains"].get(when, {"right": (float("nan"),) * 2})["right"]
    return 100 * mean, 100 * error


def gains_in_words(lines: Sequence[Mapping[str, Any]], when: str = "first") -> str:
    """How many of the lines gain, and how many by more than two standard errors."""
    found = [gained(line, when) for line in lines]
    up, clear = (sum(m > k * s for m, s in found) for k in (0, 2))
    down = sum(m < -2 * s for m, s in found)
    return f"{up} of {len(found)} pairs gain, {clear} clearly (two standard errors); {down} lose clearly"


def signature_note(model: Model) -> str:
    """How many bits KVCrush has to tell tokens by."""
    n = model.config.heads
    return (
        f"This model has {n} query heads, so KVCrush tells tokens apart by {n} bits ({n + 1} distances to an anchor), "
        f"where the paper's Llama-3-8B has 32; a page's bits are its tokens' {n} bits side by side."
    )


def figure(path: Path, panels: int, share: bool = True) -> tuple[Any, Any]:
    """A figure of panels side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig, axes = plt.subplots(1, panels, figsize=(4.5 * panels, 4), layout="constrained", squeeze=False, sharey=share)
    for ax in axes[0]:
        ax.grid(alpha=0.3)
    return fig, axes[0]


def save(fig: Any, axes: Any, path: Path, columns: int = 3) -> str:
    """Writes the figure with one legend below; returns a line that says where it is."""
    handles = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
    fig.savefig(path, dpi=130)
    plt.close(fig)
    return f"wrote {path}"


def gain_bars(path: Path, found: Found, groups: Mapping[str, Sequence[Line]]) -> str:
    """Per group a panel: each line's gain over its base, by when the question came."""
    whens = [w for w in WHEN if found.tasks(w)] or ["text"]
    field, sign = ("right", 100) if whens != ["text"] else ("nats", -1)
    fig, axes = figure(path, len(groups))
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
    return save(fig, axes, path)
