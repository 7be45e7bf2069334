"""Quality of every method at equal bytes: 1/2 to 1/16 of the full cache's.

python -m experiments.equal_bytes              runs what is missing, into runs/equal_bytes, and sums it up
make docs                                      makes a page and a plot of the sum (docs/generate/equal_bytes.py)

The compared methods are in equal_bytes.toml, or in --settings; a family may have `shares` of its own there. A setting
is fitted by its planned bytes for a context of --length tokens without headroom for answers, so that methods with large
buffers for new tokens are not favored. Seeds give other contexts; the windows of text are the same for all. A run
continues an interrupted one, and several processes can divide the work by --families, or the devices of a Ray cluster
by --ray. --sum only sums up the records;
--keep adds them to the existing sum, whose own records may be gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from experiments.bench.measuring import (
    add_worker_options,
    connect_workers,
    log_progress,
    make_parser,
    output_file,
    output_folder,
    parse_integers,
)
from experiments.papers.common import run_script
from kvjax import KvjaxError, Model
from kvjax.eval.page.summary import first_later
from kvjax.eval.run import store
from kvjax.eval.run.equal_bytes import DTYPE, fit_methods, parse_shares
from kvjax.eval.run.evaluate import evaluate
from kvjax.eval.run.machine import machine
from kvjax.eval.run.ray_workers import RayWorkers
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Case, Spec
from kvjax.eval.tasks.suite import split_words
from kvjax.generation.memory_plan import planned_bytes

FAMILIES = Path(__file__).with_suffix(".toml")
RESULTS = Path(__file__).parent / "results" / "equal_bytes.json"
FULL = "full"
SEEDLESS = ("ppl", "long_answer")  # tasks whose cases no seed changes
TASKS = ("niah", "ruler.vt", "turns", "ppl")
NEEDLES = ("niah", "niah.essays")  # tasks with a case for each depth


@dataclasses.dataclass(frozen=True)
class Point:
    """A method of a family at a fraction of the full cache's bytes."""

    family: str
    settings: str  # its line in equal_bytes.toml
    share: str  # of the full cache's bytes
    method: str  # fitted to the share; "" if none of the settings fits
    device_bytes: int  # planned, of one context
    host_bytes: int


def fit_points(model: Model, shares: Sequence[Fraction], length: int, families: Path = FAMILIES) -> list[Point]:
    """Fits all methods to all shares, or to the shares of their family."""
    found = []
    for family in tomllib.loads(families.read_text())["family"]:
        own = parse_shares(family["shares"]) if "shares" in family else shares
        for settings in family["methods"]:
            found += fit_line(model, own, length, family["name"], settings)
    return found


def fit_line(model: Model, shares: Sequence[Fraction], length: int, family: str, settings: str) -> list[Point]:
    """Fits a line of equal_bytes.toml to each share.

    A line may hold variants of a method, such as KIVI at 2 bits and at 1. The largest that fits is taken, as someone
    with that memory would choose. Variants that this model cannot have are left out, if it can have any.
    """
    found, each, problems = [], [], []
    for variant in settings.split(";"):
        try:
            each += fit_methods([variant.strip()], shares, model.config, length)
        except KvjaxError as e:
            problems.append(e)
    if not each:
        raise problems[0]
    for share in shares:
        largest = max((f for f in each if f.share == share), key=lambda f: f.bytes)
        sizes = {"device": 0, "pinned_host": 0}
        if largest.method:
            sizes = planned_bytes(largest.method, model.config, length, dtype=DTYPE).held
        found.append(Point(family, settings, str(share), largest.method, sizes["device"], sizes["pinned_host"]))
    return found


def measure(
    model: Model,
    family: str,
    methods: Sequence[str],
    args: argparse.Namespace,
    workers: RayWorkers | None = None,
) -> dict[str, str]:
    """Evaluates every method of a family on the cases without a record; returns the problems by method."""
    wrong: dict[str, str] = {}
    for seed in args.seeds:
        log_progress(f"{family}, seed {seed}: {len(methods)} methods")
        cases, description = make_cases(model, methods, seed, args)
        if workers is not None:
            description |= workers.load(model)
        with store.open_store(_folder(args.out, family, seed), description) as records:
            options = {"batch": args.batch, "seed": seed, "workers": workers}
            remaining = [method for method in methods if method not in wrong]
            # All methods run together first: each batch is then read exactly once, and reading takes most of the time.
            try:
                evaluate(model, remaining, cases, records, **options)
            except KvjaxError:  # one by one, so that the others still get records
                for method in remaining:
                    try:
                        evaluate(model, [method], cases, records, **options)
                    except KvjaxError as e:
                        wrong[method] = str(e)
                        log_progress(f"failed: {e}")
    return wrong


def make_cases(
    model: Model, methods: Sequence[str], seed: int, args: argparse.Namespace
) -> tuple[list[Case], dict[str, Any]]:
    """The cases of a seed, and the description that their store needs."""
    # Text windows are the same under every seed, and would count several times in the mean.
    tasks = [t for t in args.tasks if t not in SEEDLESS or seed == args.seeds[0]]
    spec = Spec((args.length,), args.contexts, args.questions, args.depths, seed, args.text)
    needles = dataclasses.replace(spec, contexts=max(args.contexts // args.depths, 1))  # per depth
    cases = [case for t in tasks for case in suite.cases(model, [t], needles if t in NEEDLES else spec)]
    about = {"seed": seed, "batch": args.batch, "question_aware": False}
    return cases, store.describe_run(model, **about, methods=methods, tasks=tasks, lengths=[args.length])


def _folder(out: Path, family: str, seed: int) -> Path:
    return out / family.replace(" ", "_") / f"seed{seed}"


Scores = dict[str, dict[str, dict[str, list[float]]]]
"""method -> task -> seed -> scores of the contexts: 0 to 1 (in `turns`, of later questions), or bits per byte."""


def complete_scores(families: Sequence[str], args: argparse.Namespace) -> Scores:
    """Scores of all methods with a record of every case, on top of the earlier sum if --keep asks for it."""
    earlier = read_sum(args) if args.keep else {}
    found = read_scores(families, args)

    def counts(by_task: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[tuple[str, str], int]:
        return {(task, seed): len(values) for task, by_seed in by_task.items() for seed, values in by_seed.items()}

    # `full` fits every task, so it has all records. A method that lacks some would be compared on other contexts.
    complete = counts(earlier[FULL] if earlier else found[FULL])
    return earlier | {method: by_task for method, by_task in found.items() if counts(by_task) == complete}


def read_sum(args: argparse.Namespace) -> Scores:
    """Reads the scores of the sum in --results; raises KvjaxError if it has other contexts."""
    document = json.loads(args.results.read_text())
    for name in ("model", "length", "tasks", "seeds"):
        if document[name] != (value := getattr(args, name)):
            raise KvjaxError(f"{args.results} has {name} {document[name]}, not {value}; leave out --keep")
    return document["scores"]


def read_scores(families: Sequence[str], args: argparse.Namespace) -> Scores:
    """Reads the scores of all records, complete or not."""
    found: Scores = {}
    for family, seed in itertools.product(families, args.seeds):
        folder = _folder(args.out, family, seed)
        of_seed: dict[tuple[str, str], list[float]] = {}
        for record in store.read(folder) if folder.exists() else []:
            of_seed.setdefault((record["method"], record["task"]), []).append(round(score(record), 4))
        for (method, task), values in of_seed.items():
            found.setdefault(method, {}).setdefault(task, {})[str(seed)] = values
    return found


def score(record: Mapping[str, Any]) -> float:
    """Returns a context's score: bits per byte, or the fraction of right answers, of a conversation's later ones."""
    if record.get("bits") is not None:
        return record["bits"]
    # The first question of a conversation was part of what was compressed; only the later ones are a test of it.
    return first_later(record)[1] if record["turns"] else float(np.mean(record["scores"]))


def sum_up(model: Model, points: Sequence[Point], wrong: Mapping[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """The document from which docs/generate makes the page."""
    families = by_family(points)
    measured = [method for methods in families.values() for method in methods]
    # Pages state bytes in bfloat16, whatever dtype the scores were computed in.
    planned = {method: planned_bytes(method, model.config, args.length, dtype=DTYPE) for method in measured}
    return {
        "model": args.model,
        "length": args.length,
        "computed_in": model.dtype.name,
        "bytes_in": DTYPE,
        "tasks": list(args.tasks),
        "seeds": args.seeds,
        "full_bytes": planned[FULL].held["device"],
        "machine": machine(),
        "points": [dataclasses.asdict(point) for point in points],
        "bfloat16": {m: (p.fraction_of_full, p.host_fraction_of_full) for m, p in planned.items()},
        "scores": complete_scores(list(families), args),
        "failed": dict(wrong),
    }


def by_family(points: Sequence[Point]) -> dict[str, list[str]]:
    """The fitted methods by family; the baseline `full` is a family of its own."""
    families = {FULL: [FULL]}
    for point in points:
        families.setdefault(point.family, []).append(point.method)
    return {name: list(dict.fromkeys(filter(None, methods))) for name, methods in families.items()}


def main(argv: Sequence[str] | None = None) -> None:
    p = make_parser(__doc__)
    p.add_argument("--model", default="testbed", help="a checkpoint directory (default: the shipped model)")
    p.add_argument("--shares", default="1/2,1/4,1/8,1/16", help="of the bytes that the full cache takes")
    p.add_argument("--settings", type=Path, default=FAMILIES, help="the compared methods (default: equal_bytes.toml)")
    p.add_argument("--families", type=split_words, help="only these families, and no sum")
    p.add_argument("--sum", action="store_true", help="run nothing")
    p.add_argument("--keep", action="store_true", help="keep the scores of --results for methods without records")
    p.add_argument("--tasks", type=split_words, default=list(TASKS))
    p.add_argument("--length", type=int, default=2048, help="tokens of a context")
    p.add_argument("--contexts", type=int, default=8, help="per task and seed; of needles, at all depths together")
    p.add_argument("--questions", type=int, default=4, help="per context, where a task has several")
    p.add_argument("--depths", type=int, default=4, help="places of a needle")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--seeds", type=parse_integers, default=[0, 1, 2])
    p.add_argument("--text", type=Path, help="a UTF-8 text (default: held-out source code)")
    p.add_argument("--out", type=output_folder, default=Path("runs/equal_bytes"), help="the records")
    p.add_argument("--results", type=output_file, default=RESULTS, help="their sum")
    add_worker_options(p)
    args = p.parse_args(argv)
    with connect_workers(args) as workers:
        _run(args, workers)


def _run(args: argparse.Namespace, workers: RayWorkers | None) -> None:
    model = kvjax.load(args.model)
    points = fit_points(model, parse_shares(args.shares), args.length, args.settings)
    families = by_family(points)
    unknown = [name for name in args.families or () if name not in families]
    if unknown:
        raise KvjaxError(f"--families has {unknown[0]!r}; there are {', '.join(families)}")
    wrong: dict[str, str] = {}
    if not args.sum:
        for family in args.families or families:
            wrong |= measure(model, family, families[family], args, workers)
    if args.sum or not args.families:
        args.results.write_text(json.dumps(sum_up(model, points, wrong, args)) + "\n")
        log_progress(f"wrote {args.results}")


if __name__ == "__main__":
    run_script(main)
