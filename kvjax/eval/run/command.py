"""What `kvjax eval` and `kvjax report` do."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from rich.console import Console

from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.eval.run import equal_bytes, store
from kvjax.eval.run.bars import bars
from kvjax.eval.run.compare import compare
from kvjax.eval.run.comparison import WIDTH
from kvjax.eval.tasks import packaged, suite
from kvjax.eval.tasks.case import Spec
from kvjax.eval.tasks.chat_format import framed
from kvjax.eval.tasks.suite import words
from kvjax.methods.strings import resolve, split_list
from kvjax.models.model import Model, load

CSV = "summary.csv"
INSTALL = 'pip install "kvjax[eval]"'

LEAST = {"contexts": 1, "questions": 1, "depths": 1, "batch": 1, "seed": 0}
"""What the numbers among the arguments must at least be."""


def run(args: argparse.Namespace) -> None:
    """Evaluates, then writes the summary, the plots and the page; raises KvjaxError before anything runs if it can."""
    if args.list:
        found = suite.described()
        width = max(map(len, found))
        print("\n".join(f"{name:<{width}}  {line}" for name, line in found.items()))
        return
    resolve(args.methods)  # a slip is said before a large model is loaded
    tasks, spec = suite.expand(words(args.tasks)), specification(args)
    shares = () if args.budget_bytes is None else equal_bytes.shares_of(args.budget_bytes)
    length, *others = spec.lengths
    if shares and others:
        raise KvjaxError("--budget-bytes chooses sizes for one length; give --lengths one")
    if lacking := [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]:
        _say(f"without {' and '.join(lacking)} there will be {CSV} and no page; for that: {INSTALL}")
    model = load(args.model, dtype=args.dtype)
    if spec.chat:
        framed(model, spec)  # without a template that is said now
    _warn(model, spec.lengths)
    methods = _at_equal_bytes(model, args.methods, shares, length) if shares else args.methods
    how = {"batch": args.batch, "seen": args.seen, "speed": not args.no_speed, "rebuild": args.rebuild}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KvjaxWarning)  # of positions, which `_warn` has told once for all methods
            compare(model, methods, tasks, spec, args.out, **how, progress=bars(), left_out=_say)
    except KeyboardInterrupt:
        raise KvjaxError(f"stopped; the same command goes on where {args.out} ends") from None
    if (args.out / store.RUN).is_file() and (note := store.read_run(args.out).get("rebuilt")):
        _say(note)
    summarise(args.out)


def specification(args: argparse.Namespace) -> Spec:
    """The arguments as a Spec, checked."""
    for name, least in LEAST.items():
        if getattr(args, name) < least:
            raise KvjaxError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if args.text is not None and not packaged.located(args.text).exists():
        raise KvjaxError(
            f"there is no file {args.text}; give --text a UTF-8 text, a folder of .txt files, or a name: "
            f"{', '.join(packaged.TEXTS)}"
        )
    if args.data is not None and not args.data.is_dir():
        raise KvjaxError(f"there is no folder {args.data}; give --data the one with the benchmarks' files")
    lengths = tuple(dict.fromkeys(_length(w) for w in words(args.lengths)))
    if not lengths:
        raise KvjaxError("--lengths names no length; for example 512,1024")
    return Spec(lengths, args.contexts, args.questions, args.depths, args.seed, args.text, args.data, args.chat)


def _say(what: str) -> None:
    print(f"kvjax: {what}", file=sys.stderr)


def _length(word: str) -> int:
    if not word.isdecimal() or len(word) > 10 or not int(word):
        raise KvjaxError(f"--lengths has {word!r:.60}, which is no number of tokens; for example 512,1024")
    return int(word)


def _warn(model: Model, lengths: Sequence[int]) -> None:
    """Longer contexts than the model knows are a choice (StreamingLLM and InfLLM are made for them), not a mistake."""
    most = model.config.max_positions
    if max(lengths) > most:
        print(
            f"kvjax: {max(lengths)} tokens are beyond the {most} positions that {model.name} was made for: expect all "
            "methods to fail there that keep true positions, `full` too",
            file=sys.stderr,
        )


def _at_equal_bytes(model: Model, methods: str, shares: Sequence[Fraction], length: int) -> list[str]:
    """The methods at sizes that take these shares of the bytes of `full`, which comes first; says what fits nowhere."""
    found = equal_bytes.fitted(split_list(methods), shares, model.config, length)
    for method in found:
        if not method.method:
            print(
                f"kvjax: {method.asked} takes more than {method.share} of the bytes of full in bfloat16: left out",
                file=sys.stderr,
            )
    return list(dict.fromkeys(["full", *(method.method for method in found if method.method)]))


def summarise(out: Path) -> None:
    """Prints the summary of a run and writes it as CSV, as plots and as a page."""
    from kvjax.eval.page import summary

    records = store.read(out)
    rows = summary.rows(records)
    Console(width=max(Console().width, WIDTH)).print(summary.table(rows))
    print(f"wrote {summary.write_csv(rows, out / CSV)}")  # before what may lack a library
    from kvjax.eval.page import plots, report  # slow to import, and the table is what is waited for

    drawn = plots.write(plots.plots(rows, records), out)
    written = [*drawn[:1], report.write(out)]
    print("wrote " + ", ".join(str(p.parent if p.suffix == ".png" else p) for p in written))


def render(out: Path) -> None:
    """Renders the page of a run, also of one that is still going on, and says where it is."""
    from kvjax.eval.page import report

    if (out / store.RECORDS).is_file() and not (out / store.RUN).is_file():
        _say(f"{out} has records but no {store.RUN}, so that the page cannot say how they were made; {store.KEEP}")
    print(f"wrote {report.write(out)}")
