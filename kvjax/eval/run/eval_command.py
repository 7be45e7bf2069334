"""The commands `kvjax eval`, `kvjax report` and `kvjax demo`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from kvjax import processes
from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.eval.run import equal_bytes, merge, store
from kvjax.eval.run.compare import compare
from kvjax.eval.run.comparison import TABLE_COLUMNS
from kvjax.eval.run.parts import Part, detect_part, parse_part
from kvjax.eval.run.progress import bars
from kvjax.eval.run.ray_workers import RayWorkers, connect_if_asked
from kvjax.eval.tasks import data_files, suite, symbols
from kvjax.eval.tasks.case import Spec
from kvjax.eval.tasks.chat_format import chat_format
from kvjax.eval.tasks.suite import split_words
from kvjax.models.model import Model, load
from kvjax.registry.strings import resolve, split_list
from kvjax.utils import display
from kvjax.utils.files import make_folder
from kvjax.utils.packages import import_optional

CSV = "summary.csv"
INSTALL = 'pip install "kvjax[eval]"'

# The exact cache, and three ways to a quarter of its bytes: fewer bits, fewer tokens, and some of both.
DEMO_METHODS = "full; kivi:bits=2,residual=32; snapkv:budget=25%; snapkv:budget=50% + kivi:bits=4,residual=64"
ALL_DEMO_METHODS = (
    "full; offload; kcache:n=32; kivi:bits=2; kivi:bits=1,residual=64; specache:bits=1; snapkv:budget=512; "
    "snapkv:budget=512 + kvcrush; snapkv:budget=512 + kvcrush + kivi:bits=4; h2o:heavy=256,recent=256; "
    "streaming_llm:recent=508"
)
SMALL_MODEL_NOTE = """\
This model was trained to recall pairs, and a few bits keep what that takes: `kivi` with 2 bits is right as often as
`full` here, and answers 12% of later questions on SmolLM2-135M, where `full` answers 83%. Numbers of real models are in
docs/results.md; `kvjax demo --model smollm2-135m` makes some."""


def run(args: argparse.Namespace, mesh: Mesh | None = None) -> None:
    """Evaluates, then writes the summary, the plots and the page; raises KvjaxError before anything runs if it can.

    Args:
      args: of the command.
      mesh: of the model; where several processes share it, the first writes, and all others only compute.
    """
    if args.list:
        lines = suite.describe_tasks()
        width = max(map(len, lines))
        print("\n".join(f"{name:<{width}}  {line}" for name, line in lines.items()))
        return
    resolve(args.methods)  # a misspelled method is reported before a large model is loaded
    if args.ray is not None and mesh is not None:
        raise KvjaxError(
            "--ray gives every worker a model of its own and --mesh divides one among devices; leave one of the two out"
        )
    # Before anything is computed: workers get the accelerators, and Ray forks before JAX has threads.
    with connect_if_asked(args.ray, args.workers, _say) as workers:
        _run(args, mesh, workers)


def _run(args: argparse.Namespace, mesh: Mesh | None, workers: RayWorkers | None) -> None:
    part, tasks, spec = _choose_part(args), suite.expand(split_words(args.tasks), _say), _make_spec(args)
    if spec.text is not None:
        data_files.read_text(spec.text)  # so is a text that cannot be read
    shares = () if args.budget_bytes is None else equal_bytes.parse_shares(args.budget_bytes)
    length, *others = spec.lengths
    if shares and others:
        raise KvjaxError("--budget-bytes chooses sizes for one length; give --lengths one")
    if missing := _missing_packages():
        _say(f"without {' and '.join(missing)} there will be {CSV} and no page; for that: {INSTALL}")
    if processes.is_writer():
        make_folder(args.out, "--out")  # and a folder that cannot be written
    model = load(args.model, dtype=args.dtype, mesh=mesh, weights=args.weights)
    if spec.chat:
        chat_format(model, spec)  # a missing template is reported now
    most = model.config.max_positions
    # Longer contexts are a choice (StreamingLLM and InfLLM are made for them), not a mistake.
    if max(spec.lengths) > most:
        _say(
            f"{max(spec.lengths)} tokens are beyond the {most} positions that {model.name} was made for: expect all "
            "methods to fail there that keep true positions, `full` too"
        )
    methods = _at_equal_bytes(model, args.methods, shares, length) if shares else args.methods
    options = {"batch": args.batch, "question_aware": args.question_aware, "speed": not args.no_speed}
    try:
        # Ray prints to stdout, where the table goes, when a worker dies.
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            # Every method would warn of the positions again.
            warnings.simplefilter("ignore", KvjaxWarning)
            options |= {"progress": bars(), "left_out": _say, "announce": _say}
            rows = compare(model, methods, tasks, spec, args.out, part=part, workers=workers, **options)
    except KeyboardInterrupt:
        folder = args.out if part is None else args.out / part.folder
        kept = len(store.parse_records(folder / store.RECORDS))
        raise KvjaxError(
            f"stopped; {folder} keeps {display.count(kept, 'record')}, and the same command goes on from there"
        ) from None
    if not processes.is_writer():
        return
    if part is None:
        summarize(args.out)
    else:
        contexts = sum(row.contexts for row in rows)
        print(f"{part} is complete: {display.count(contexts, 'record')} in {args.out / part.folder}")
        print(f"when all parts are: kvjax report {shlex.quote(str(args.out))}")


def _missing_packages() -> list[str]:
    """Those packages that plots and the page need and that are not installed."""
    return [name for name in ("altair", "vl_convert") if importlib.util.find_spec(name) is None]


def _choose_part(args: argparse.Namespace) -> Part | None:
    """The part of --part, or that of the job array in which the command runs, which it says on the screen."""
    command = shlex.join(["kvjax", *_without_part(args.argv)])
    if args.part == "off":
        return None
    if args.part not in (None, "auto"):
        return parse_part(args.part, command)
    found = detect_part(os.environ, jax.process_count())
    if found is None:
        if args.part == "auto":
            raise KvjaxError(
                "--part auto finds neither a SLURM array nor a Kubernetes Indexed Job; say which part, as in --part 3/8"
            )
        return None
    part, where = found
    _say(f"{part}, by {where}, into {args.out / part.folder}; --part off runs everything")
    return dataclasses.replace(part, command=command)


def _without_part(words: Sequence[str]) -> list[str]:
    kept, is_value = [], False
    for word in words:
        if not is_value and word != "--part" and not word.startswith("--part="):
            kept.append(word)
        is_value = not is_value and word == "--part"
    return kept


def demo(args: argparse.Namespace) -> None:
    """Compares methods on a choice of tasks, prints the table, and writes demo.json and, with Altair, demo.png."""
    methods = args.methods if args.methods is not None else ALL_DEMO_METHODS if args.full else DEMO_METHODS
    resolve(methods)
    make_folder(args.out, "--out")  # an impossible folder is reported now
    model = load(args.model, weights=args.weights)
    if symbols.knows_symbols(model):
        tasks, spec = "symbols.recall,ppl", Spec((2048 if args.full else 1024,), contexts=8, questions=8)
    else:
        tasks = "niah,ppl" if data_files.ESSAYS.find() is None else "niah.essays,ppl"
        spec = Spec((1024 if args.full else 512,), contexts=2, depths=4)
    rows = compare(model, methods, tasks, spec, speed=True, progress=bars(), announce=_say)
    print(rows)
    if symbols.knows_symbols(model):
        print(SMALL_MODEL_NOTE)
    rows.to_json(args.out / "demo.json")
    if importlib.util.find_spec("altair") is None:
        print(f"wrote {args.out / 'demo.json'}; a plot of it needs altair: {INSTALL}")
    else:
        rows.plot(args.out / "demo.png")
        print(f"wrote {args.out / 'demo.json'} and {args.out / 'demo.png'}")


def _make_spec(args: argparse.Namespace) -> Spec:
    words = dict.fromkeys(split_words(args.lengths))
    # A word that is no number goes on as it is, and the Spec names it.
    lengths: Any = tuple(int(word) if word.isdecimal() and len(word) <= 10 else word for word in words)
    return Spec(lengths, args.contexts, args.questions, args.depths, args.seed, args.text, args.data, args.chat)


def _say(line: str) -> None:
    if processes.is_writer():
        print(f"kvjax: {line}", file=sys.stderr)


def _at_equal_bytes(model: Model, methods: str, shares: Sequence[Fraction], length: int) -> list[str]:
    """The methods at sizes that take these fractions of the bytes of `full`, which comes first; prints the misfits."""
    fitted = equal_bytes.fit_methods(split_list(methods), shares, model.config, length)
    for method in fitted:
        if not method.method:
            _say(f"{method.asked} takes more than {method.share} of the bytes of full in bfloat16: left out")
    return list(dict.fromkeys(["full", *(method.method for method in fitted if method.method)]))


def summarize(out: Path) -> None:
    """Prints the summary of a run and writes it as CSV, as plots and as a page."""
    from kvjax.eval.page import summary

    records = store.read(out)
    rows = summary.rows(records)
    Console(width=max(Console().width, TABLE_COLUMNS)).print(summary.table(rows))
    # The table and the CSV file come first: plots and page are slow to import, and may lack a library.
    print(f"wrote {summary.write_csv(rows, out / CSV)}")
    if missing := _missing_packages():  # as was said before the run, whose results are whole without the page
        _say(f"no plots and no page without {' and '.join(missing)}: {INSTALL}, then kvjax report {out}")
        return
    from kvjax.eval.page import charts, report

    pictures = charts.write(charts.pictures(rows, records), out)
    paths = [*pictures[:1], report.write(out)]
    print("wrote " + ", ".join(str(p.parent if p.suffix == ".png" else p) for p in paths))


def report(args: argparse.Namespace) -> None:
    """Renders the page of a run, also of one that is still going on; several folders are put together first."""
    if merge.needs_merge(args.dir):
        out = merge.merge(args.dir, args.out, partial=args.partial, say=_say)
        num_folders = len(store.read_run(out)[store.MERGED])
        print(f"wrote {out / store.RECORDS} and {out / store.RUN}, from {display.count(num_folders, 'folder')}")
        summarize(out)
        return
    if args.out is not None:
        raise KvjaxError("--out is where several folders are put together; a page of one folder goes into it")
    import_optional("altair", "plots need")
    from kvjax.eval.page import report

    (out,) = args.dir
    if (out / store.RECORDS).is_file() and not (out / store.RUN).is_file():
        _say(f"{out} has records but no {store.RUN}, so that the page cannot say how they were made; copy it again")
    print(f"wrote {report.write(out)}")
