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
from kvjax.eval.page import summary
from kvjax.eval.run import harness
from kvjax.eval.run.comparison import Comparison
from kvjax.eval.run.context_reader import ContextReader, padded_width
from kvjax.eval.tasks import data_files, suite, symbols
from kvjax.eval.tasks.case import Case, Spec
from kvjax.eval.tasks.metrics import METRICS
from kvjax.models.model import Model, load
from kvjax.registry.strings import Methods, method_of, resolve
from kvjax.testbed import corpus, tasks
from kvjax.utils.files import write_text

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
NUM_TURNS = 5  # in each turn every method decodes once
DECODED_TOKENS = 32  # after each context, in a turn
SEED = 1_000_003
WIDE_COLUMNS = 100  # of a terminal, from which on every row of the table has one line


@dataclasses.dataclass(frozen=True)
class DemoRow:
    """One line of the table; bytes are the average over contexts."""

    method: str
    recall: float  # fraction of the questions that are answered
    code_bits: float  # bits per byte of source code
    agreement: float  # fraction of code tokens at which the likeliest token is that of `full`
    device_bytes: int  # measured, in `dtype`
    host_bytes: int
    dtype: str  # of the model
    fraction_of_full: float  # device bytes, of the exact cache's in the model's dtype
    bfloat16_fraction: float  # the same of the same tokens, both in bfloat16
    bfloat16_device_bytes: int  # shown in the table, as planned for a cache in bfloat16
    bfloat16_host_bytes: int
    tokens_per_second: tuple[float, ...] = ()  # of each turn, decoding all contexts at once


@dataclasses.dataclass(frozen=True)
class DemoBenchmark:
    """The cases of every method: contexts with questions, and texts whose last part is predicted."""

    model: Model
    questions: Sequence[Case]
    texts: Sequence[Case]
    about: str  # the subject of the questions

    @property
    def length(self) -> int:
        """Tokens of a context."""
        return int(self.questions[0].about["length"])

    @functools.cached_property
    def reader(self) -> ContextReader:
        """Reads all contexts with room for the longest continuation: equal shapes share their programs."""
        asks = [ask for case in self.questions for ask in case.asks]
        answers = max(padded_width(len(ask.prompt)) for ask in asks) + max(ask.new_tokens for ask in asks)
        follows = max(padded_width(len(case.follows)) for case in self.texts if case.follows is not None)
        return ContextReader(self.model, least_headroom_tokens=max(answers, follows, DECODED_TOKENS))


def make_benchmark(model: Model, full: bool = False) -> DemoBenchmark:
    """Makes the cases: symbols in held-out code if the model knows symbols, or else needles in real text.

    All contexts have about one length, so that few programs are compiled.

    Args:
      model: from `kvjax.load`.
      full: longer contexts.
    """
    if not symbols.knows_symbols(model):
        has_essays = data_files.ESSAYS.find() is not None
        spec = Spec(lengths=(1024 if full else 512,), contexts=2, depths=4, seed=SEED)
        needles = suite.cases(model, ["niah.essays" if has_essays else "niah"], spec)
        texts = suite.cases(model, ["ppl"], dataclasses.replace(spec, contexts=4))
        return DemoBenchmark(model, needles, texts, f"needles in {'essays' if has_essays else 'source code'}")
    rng, code = np.random.default_rng(SEED), corpus.load("held_out").window
    length, num_read, num_predicted = (2048, 1536, 512) if full else (1024, 1024, 256)
    instances = [tasks.recall(rng, length, code) for _ in range(8)]
    questions = [symbols.instance_case("recall", f"recall/{i}", x, len(x.questions)) for i, x in enumerate(instances)]
    texts = []
    for i in range(8):
        ids = code(rng, num_read + num_predicted)
        # A token of code is a byte.
        texts.append(Case("ppl", f"ppl/{i}", ids[:num_read], follows=ids[num_read:], bytes=num_predicted))
    return DemoBenchmark(model, questions, texts, "values of keys in code")


def measure(benchmark: DemoBenchmark, methods: Methods) -> Iterator[DemoRow]:
    """Yields one row per method as it is measured; `agreement` is with the first method."""
    reference = None
    longest = max(ask.new_tokens for case in benchmark.questions for ask in case.asks)
    for name, method in resolve(methods).items():
        replies, size = harness.ask_shared_context(benchmark.reader, method, benchmark.questions, longest)
        scores = []
        for number, texts in enumerate(replies):
            asks = [case.asks[number] for case in benchmark.questions]
            scores += [METRICS[ask.metric](text, ask) for ask, text in zip(asks, texts, strict=True)]
        bits, best, _ = harness.score_continuations(benchmark.reader, method, benchmark.texts)
        likeliest, each = np.concatenate(best), size.per_sequence(len(benchmark.questions))
        in_bfloat16 = harness.bfloat16_bytes(method_of(method), benchmark.model.config, benchmark.length)
        reference = likeliest if reference is None else reference
        yield DemoRow(
            name,
            float(np.mean(scores)),
            float(sum(map(np.sum, bits)) / sum(case.bytes for case in benchmark.texts)),
            float((likeliest == reference).mean()),
            each.held["device"],
            each.held["pinned_host"],
            each.dtype,
            each.fraction_of_full,
            in_bfloat16.fraction_of_full,
            in_bfloat16.held["device"],
            in_bfloat16.held["pinned_host"],
        )


def decode_in_turns(
    benchmark: DemoBenchmark, methods: Sequence[KVMethod], turns: int = NUM_TURNS
) -> Iterator[list[float]]:
    """Decodes under all methods, one after the other, in each turn; yields tokens per second of each method.

    Other work of the machine slows a turn, and so all methods alike. The loop is the default one of `generate`.
    """
    contexts = [case.context for case in benchmark.questions]
    read = [benchmark.reader.read(contexts, m, headroom_tokens=DECODED_TOKENS) for m in methods]
    for turn in range(turns + 1):
        rates = [c.generate(max_new_tokens=DECODED_TOKENS, eos_ids=()).tokens_per_second for c in read]
        if turn:  # the first one compiles
            yield rates


def table(rows: Sequence[DemoRow], benchmark: DemoBenchmark, model: str, width: int = 80) -> Table:
    """Makes the table for a terminal of `width` columns; host memory and speeds only where there are any."""
    dtype, num_contexts = benchmark.model.dtype, len(benchmark.questions)
    same, first = ("= full", "`full`") if rows[0].method == "full" else ("= first", "the first method")
    is_wide, has_host = width >= WIDE_COLUMNS, any(r.bfloat16_host_bytes for r in rows)
    num_turns = max(len(r.tokens_per_second) for r in rows)
    caption = [
        f"right: {benchmark.about}, asked after the method has compressed the context",
        f"{same}: tokens of held-out source code predicted as under {first}",
        "KiB, of full: a context on the device, and its part of the exact cache's bytes"
        + ("; host: KiB in host memory" if has_host else ""),
        f"all bytes are those of caches in bfloat16, whatever the model computes in, here {dtype}",
    ]
    if num_turns:
        speeds = f"tokens/s: decoding all contexts at once, median (and range) of {num_turns} turns of all methods"
        caption.append(speeds + ("; so small a model shows overhead, not gain" if model == "testbed" else ""))
    t = Table(
        title=f"{model} in {dtype}: {num_contexts} contexts of {benchmark.length:,} tokens",
        caption=escape("\n".join(caption)),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )

    gap, rates = " " if is_wide else "\n", [r.tokens_per_second for r in rows]
    cells = {
        "right": [f"{r.recall:.0%}" for r in rows],
        same: [f"{r.agreement:.1%}" for r in rows],
        "KiB": [f"{r.bfloat16_device_bytes / 1024:,.0f}" for r in rows],
        "of full": [f"{r.bfloat16_fraction:.1%}" for r in rows],
        "host": [f"{r.bfloat16_host_bytes / 1024:,.0f}" if r.bfloat16_host_bytes else "" for r in rows],
        "tokens/s": [f"{statistics.median(x):,.0f}{gap}({min(x):,.0f}..{max(x):,.0f})" if x else "" for x in rates],
    }
    columns = {head: column for head, column in cells.items() if any(column)}
    lines = ([head, *"\n".join(column).split("\n")] for head, column in columns.items())
    # Two spaces follow each column, and the edges take two more.
    method_width = width - 2 - sum(2 + max(map(len, column)) for column in lines)
    t.add_column("method", overflow="fold")
    for head in columns:
        t.add_column(head, justify="right", no_wrap=True)
    for r, *numbers in zip(rows, *columns.values(), strict=True):
        t.add_row(escape(r.method if is_wide else _fold_method(r.method, method_width)), *numbers)
    return t


def _fold_method(name: str, most: int) -> str:
    """A method's name with a line for each part, and several for parts of more than `most` characters."""
    parts = name.replace(" + ", "\n+ ").split("\n")
    for i, part in enumerate(parts):
        mark = "," if "," in part else ":"
        parts[i] = part if len(part) <= most else part.replace(mark, f"{mark}\n  ")
    return "\n".join(parts)


def plot(rows: Sequence[DemoRow], path: Path) -> None:
    """Plots quality against bytes as `kvjax eval` draws it; it needs matplotlib."""
    unmeasured = dict.fromkeys(summary.FIELDS) | {"turns": False, "contexts": 1, "questions": 1}
    points = [
        unmeasured | {"method": r.method, "task": task, "score": score, "device_percent": 100 * r.bfloat16_fraction}
        for r in rows
        for task, score in (("questions answered", r.recall), ("code predicted as by the exact cache", r.agreement))
    ]
    Comparison.of(points).plot(path)


def run(out: Path, methods: Methods | None = None, model: str = "testbed", full: bool = False) -> list[DemoRow]:
    """Prints each row as it is measured and the table, and writes demo.json and, with matplotlib, demo.png into `out`.

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

    out.mkdir(parents=True, exist_ok=True)  # an impossible folder or method is reported before anything is measured
    chosen, rows = resolve(methods if methods is not None else ALL_METHODS if full else METHODS), []
    benchmark = make_benchmark(load(model), full)
    measured = measure(benchmark, tuple(chosen.values()))
    for i, name in enumerate(chosen, 1):
        say(f"{i} of {len(chosen)}: {name}")
        row = dataclasses.replace(next(measured), method=name)
        kib = f"{row.bfloat16_device_bytes / 1024:,.0f} KiB"
        say(f"    {row.recall:.0%} right, {kib} ({row.bfloat16_fraction:.1%} of the exact cache, both in bfloat16)")
        rows.append(row)
    say(f"decoding in turns, {NUM_TURNS} under each method")
    rates = zip(*decode_in_turns(benchmark, list(chosen.values())), strict=True)
    rows = [dataclasses.replace(r, tokens_per_second=each) for r, each in zip(rows, rates, strict=True)]
    console.print(table(rows, benchmark, model, console.width))
    write_text(out / "demo.json", json.dumps([dataclasses.asdict(r) for r in rows], indent=2) + "\n")
    files = f"wrote {out / 'demo.json'}"
    if importlib.util.find_spec("matplotlib") is None:
        files += "; a plot of it needs matplotlib: pip install matplotlib"
    else:
        plot(rows, out / "demo.png")
        files += f" and {out / 'demo.png'}"
    say(f"{time.perf_counter() - started:.0f} s; {files}")
    return rows
