"""The demo: methods on one model, quality beside bytes and speed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvjax.cache.contract import KVMethod
from kvjax.eval.exam import ROOM_TOKENS, Exam, exam
from kvjax.eval.page import written
from kvjax.eval.run.harness import bfloat16_fractions
from kvjax.methods.strings import Methods, method_of, named
from kvjax.models.model import load

# The exact cache, and three ways to a quarter of its bytes: fewer bits, fewer tokens, and some of both.
METHODS = (
    "full",
    "kivi:bits=2,residual=32",
    "snapkv:budget=25%",
    "snapkv:budget=50% + kivi:bits=4,residual=64",
)
ALL_METHODS = (
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
TURNS = 5  # in which each method decodes once
SEED = 1_000_003
WIDE = 100  # columns of a terminal from which on every row of the table has one line


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; bytes are those that a context holds, on average."""

    method: str
    recall: float  # fraction of the questions that are answered
    code_bits: float  # bits per byte of source code
    agreement: float  # fraction of code tokens at which the likeliest token is that of `full`
    device_bytes: int
    host_bytes: int
    dtype: str  # of the model, and of these bytes
    fraction_of_full: float  # device bytes, of the exact cache's in the model's dtype
    bfloat16_fraction: float  # the same of the same tokens, both in bfloat16
    tokens_per_second: tuple[float, ...] = ()  # of each turn, decoding all contexts at once


def measure(asked: Exam, methods: Methods) -> Iterator[Row]:
    """One row per method as it is measured, on the same questions; `agreement` is with the first method."""
    reference = None
    for name, method in named(methods).items():
        found = asked.quality(method)
        reference = found.likeliest if reference is None else reference
        yield Row(
            name,
            found.right,
            found.bits,
            float((found.likeliest == reference).mean()),
            found.bytes.held["device"],
            found.bytes.held["pinned_host"],
            found.bytes.dtype,
            found.bytes.fraction_of_full,
            bfloat16_fractions(method_of(method), asked.model.config, asked.length)["device"],
        )


def decode_in_turns(asked: Exam, methods: Sequence[KVMethod], turns: int = TURNS) -> Iterator[list[float]]:
    """Decodes under all methods, one after the other, in each turn: tokens per second, per method.

    What else the machine does slows a turn, not a method. The loop is the one that `generate` takes by default.
    """
    contexts = [asked.read(method) for method in methods]
    for turn in range(turns + 1):
        rates = [c.generate(max_new_tokens=ROOM_TOKENS, eos_ids=()).tokens_per_second for c in contexts]
        if turn:  # the first one compiles
            yield rates


def table(rows: Sequence[Row], asked: Exam, model: str, width: int = 80, explained: bool = True) -> Table:
    """For people, on so many columns; host memory and speeds only where there are any."""
    look = {"box": box.SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}
    t = Table(
        title=f"{model} in {asked.model.dtype}: {len(asked.contexts)} contexts of {asked.length:,} tokens",
        caption=_caption(rows, asked, model) if explained else None,
        caption_justify="left",
        **look,
    )
    same = "= full" if rows[0].method == "full" else "= first"
    gap = "\n" if width < WIDE else " "
    cells = {
        "right": [f"{r.recall:.0%}" for r in rows],
        same: [f"{r.agreement:.1%}" for r in rows],
        "KiB": [f"{r.device_bytes / 1024:,.0f}" for r in rows],
        "of full": [f"{r.fraction_of_full:.1%}" for r in rows],
        "bf16": [f"{r.bfloat16_fraction:.1%}" for r in rows],
        "host": [f"{r.host_bytes / 1024:,.0f}" if r.host_bytes else "" for r in rows],
        "tokens/s": [_rates(r, gap) for r in rows],
    }
    columns = {head: column for head, column in cells.items() if any(column)}
    lines = ([head, *"\n".join(column).split("\n")] for head, column in columns.items())
    room = width - 2 - sum(2 + max(map(len, column)) for column in lines)  # two spaces after each column, and the edges
    t.add_column("method", overflow="fold")
    for head in columns:
        t.add_column(head, justify="right", no_wrap=True)
    for r, *numbers in zip(rows, *columns.values(), strict=True):
        t.add_row(escape(r.method if width >= WIDE else _folded(r.method, room)), *numbers)
    return t


def _folded(name: str, most: int) -> str:
    """A method's name on several lines: one for each part, and more for parts of more than so many characters."""
    parts = name.replace(" + ", "\n+ ").split("\n")
    for i, part in enumerate(parts):
        mark = "," if "," in part else ":"
        parts[i] = part if len(part) <= most else part.replace(mark, f"{mark}\n  ")
    return "\n".join(parts)


def _rates(row: Row, gap: str) -> str:
    """Median and range."""
    if not row.tokens_per_second:
        return ""
    low, high = min(row.tokens_per_second), max(row.tokens_per_second)
    return f"{statistics.median(row.tokens_per_second):,.0f}{gap}({low:,.0f}..{high:,.0f})"


def _caption(rows: Sequence[Row], asked: Exam, model: str) -> str:
    dtype = asked.model.dtype
    same, first = ("= full", "`full`") if rows[0].method == "full" else ("= first", "the first method")
    parts = [
        f"right: {asked.questions}, asked after the method has compressed the context",
        f"{same}: tokens of {asked.text} predicted as under {first}",
        f"KiB: held on the device by a context, in {dtype}"
        + ("; host: held in host memory" if any(r.host_bytes for r in rows) else ""),
        f"of full: of the exact cache's bytes, both in {dtype}; bf16: the same, both in bfloat16",
    ]
    if any(r.tokens_per_second for r in rows):
        turns = len(rows[0].tokens_per_second)
        said = f"tokens/s: decoding all contexts at once, median (and range) of {turns} turns of all methods"
        parts.append(said + ("; so small a model shows overhead, not gain" if model == "testbed" else ""))
    return escape("\n".join(parts))


class _Display:
    """The table as it grows, on a terminal; elsewhere a line for what begins and one for what is done."""

    def __init__(self, console: Console, asked: Exam, model: str):
        self._console, self._asked, self._model = console, asked, model
        self._progress = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._task = self._progress.add_task("")
        animated = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console) if animated else None

    def __enter__(self) -> _Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, what: str, rows: Sequence[Row]) -> None:
        """Says what runs now, under the rows that are done."""
        if self._live is None:
            self._line(what)
            return
        self._progress.update(self._task, description=escape(what))
        done = [self._table(rows, explained=False)] if rows else []
        self._live.update(Group(*done, self._progress), refresh=True)

    def done(self, row: Row) -> None:
        """Says what a method was measured to be, where no table shows it."""
        if self._live is None:
            of_full = f"{row.fraction_of_full:.1%} of full in {row.dtype}, {row.bfloat16_fraction:.1%} in bfloat16"
            self._line(f"    {row.recall:.0%} right, {row.device_bytes / 1024:,.0f} KiB held: {of_full}")

    def finish(self, rows: Sequence[Row]) -> None:
        """The whole table."""
        if self._live is None:
            self._console.print(self._table(rows))
        else:
            self._live.update(self._table(rows), refresh=True)

    def _table(self, rows: Sequence[Row], explained: bool = True) -> Table:
        return table(rows, self._asked, self._model, self._console.width, explained)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


def plot(rows: Sequence[Row], path: Path) -> None:
    """Quality against the fraction of the exact cache's bytes, one point per method; it needs matplotlib."""
    import matplotlib.pyplot as plt

    from kvjax.eval.page.panels import percents

    fig, axes = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    panels = (("recall", "questions answered, %"), ("agreement", "code predicted as by the exact cache, %"))
    for ax, (field, label) in zip(axes, panels, strict=True):
        for i, r in enumerate(rows):
            x, y = 100 * r.bfloat16_fraction, 100 * getattr(r, field)
            ax.plot(x, y, "os^"[i // 10 % 3], color=f"C{i % 10}", markersize=9, alpha=0.85, label=r.method)
        ax.set_ylabel(label)
        ax.spines[["top", "right"]].set_visible(False)
        most = max(100 * r.bfloat16_fraction for r in rows)
        ax.set_xlim(-2, max(104.0, 1.04 * most))
        if most <= 100:  # a method with more than it saves is drawn where it is
            percents(ax.xaxis, 100)
        low = min(100 * getattr(r, field) for r in rows)
        ax.set_ylim(max(0.0, low - 0.15 * (100 - low) - 2), 100 + max(0.5, 0.06 * (100 - low)))
        percents(ax.yaxis, 100)
        ax.grid(alpha=0.3)
    fig.supxlabel("bytes held on the device, % of the exact cache's, both in bfloat16", fontsize="medium")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=2 if len(rows) <= 4 else 3, frameon=False)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def run(out: Path, methods: Methods | None = None, model: str = "testbed", full: bool = False) -> list[Row]:
    """Prints the table as it grows, and writes demo.json and, with matplotlib, demo.png into `out`.

    Args:
      out: the folder.
      methods: values, strings, or strings separated by ";"; default four, or with `full` eleven.
      model: a model's name or directory.
      full: longer contexts and all of the methods.

    Returns:
      A row per method.
    """
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)  # what cannot be is told before anything is measured
    chosen = named(methods if methods is not None else ALL_METHODS if full else METHODS)
    console, rows = Console(), []
    with console.status("loading the model") if console.is_terminal else contextlib.nullcontext():
        asked = exam(load(model), SEED, short=not full)
    with _Display(console, asked, model) as display:
        measured = measure(asked, tuple(chosen.values()))
        for i, name in enumerate(chosen, 1):
            display.begin(f"{i} of {len(chosen)}: {name}", rows)
            rows.append(dataclasses.replace(next(measured), method=name))
            display.done(rows[-1])
        display.begin(f"decoding in turns, {TURNS} under each method", rows)
        rates = zip(*decode_in_turns(asked, list(chosen.values())), strict=True)
        rows = [dataclasses.replace(r, tokens_per_second=each) for r, each in zip(rows, rates, strict=True)]
        display.finish(rows)
    written.write(out / "demo.json", json.dumps([dataclasses.asdict(r) for r in rows], indent=2) + "\n")
    files = f"wrote {out / 'demo.json'}"
    if importlib.util.find_spec("matplotlib") is None:
        files += "; a plot of it needs matplotlib: pip install matplotlib"
    else:
        plot(rows, out / "demo.png")
        files += f" and {out / 'demo.png'}"
    console.print(f"{time.perf_counter() - started:.0f} s; {files}", highlight=False, soft_wrap=True)
    return rows
