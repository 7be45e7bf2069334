"""The demo: methods on one model, quality beside bytes and speed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvjax.eval.exam import Exam, exam
from kvjax.eval.page import written
from kvjax.methods.strings import Methods, named
from kvjax.models.model import load
from kvjax.run.generate import generate

METHODS = (
    "full",
    "offload",
    "kcache:n=32",
    "kivi:bits=2",
    "kivi:bits=1,residual=64",
    "specache:bits=1",
    "snapkv:budget=512",
    "snapkv:budget=512 + kvcrush",
    "snapkv:budget=512 + kvcrush + kivi:bits=4",
    "h2o:heavy=256,recent=256",
    "streaming_llm:recent=508",
)
NEW_TOKENS = 64
SEED = 1_000_003


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    method: str
    recall: float  # share of questions that are answered
    code_bits: float  # bits per byte of source code
    agreement: float  # share of code tokens at which the likeliest token is that of `full`
    device_bytes: int  # of the state of one context
    host_bytes: int
    tokens_per_second: float  # decoding all contexts at once


def measure(asked: Exam, methods: Methods) -> Iterator[Row]:
    """One row per method as it is measured, on the same questions; `agreement` is with the first method."""
    reference = None
    for name, method in track(named(methods).items(), "methods", transient=True):
        found = asked.quality(method)
        reference = found.likeliest if reference is None else reference
        speed = generate(asked.model, asked.contexts, method, max_new_tokens=NEW_TOKENS, eos_ids=(), loop="while")
        yield Row(
            name,
            found.right,
            found.bits,
            float((found.likeliest == reference).mean()),
            found.bytes.held["device"],
            found.bytes.held["pinned_host"],
            speed.tokens_per_second,
        )


def table(rows: list[Row], asked: Exam) -> Table:
    """For people."""
    look = {"box": box.SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}  # fits 80 columns
    t = Table(title=f"{asked.length:,}-token contexts, {len(asked.contexts)} at a time", **look)
    t.add_column("method", max_width=29)
    for name in ("recall", "bits/B", "= full", "device", "host", "tok/s"):
        t.add_column(name, justify="right", no_wrap=True)
    t.caption = (
        f"recall: {asked.questions}; bits/B: of {asked.text}; = full: tokens of it predicted as `full` does; "
        "device, host: KiB a context"
    )
    for r in rows:
        numbers = (f"{r.recall:.1%}", f"{r.code_bits:.3f}", f"{r.agreement:.1%}")
        sizes = (f"{r.device_bytes / 1024:,.0f}", f"{r.host_bytes / 1024:,.0f}")
        t.add_row(r.method, *numbers, *sizes, f"{r.tokens_per_second:,.0f}")
    return t


def plot(rows: list[Row], path: Path) -> None:
    """Quality against device bytes, one point per method; it needs matplotlib."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    panels = (("recall", "recall accuracy"), ("code_bits", "code, bits per byte"))
    for ax, (field, label) in zip(axes, panels, strict=True):
        for i, r in enumerate(rows):
            x, y = r.device_bytes / 1024, getattr(r, field)
            ax.plot(x, y, "os^"[i // 10 % 3], color=f"C{i % 10}", markersize=8, alpha=0.8, label=r.method)
        ax.set(xlabel="bytes on the device per context (KiB)", ylabel=label)
        ax.set_xlim(left=0)
        ax.grid(alpha=0.3)
    axes[0].set_ylim(-0.03, 1.03)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def run(out: Path, methods: Methods = METHODS, model: str = "testbed") -> list[Row]:
    """Prints the table, and writes demo.json and, with matplotlib, demo.png into `out`.

    methods: values, strings, or strings separated by ";".
    """
    out.mkdir(parents=True, exist_ok=True)  # what cannot be is told before an hour of measuring
    console = Console()
    asked = exam(load(model), SEED)
    rows = list(measure(asked, methods))
    console.print(table(rows, asked))
    written.write(out / "demo.json", json.dumps([dataclasses.asdict(r) for r in rows], indent=2) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        console.print(f"wrote {out / 'demo.json'}; a plot of it needs matplotlib: pip install matplotlib")
    else:
        plot(rows, out / "demo.png")
        console.print(f"wrote {out / 'demo.json'} and {out / 'demo.png'}")
    return rows
