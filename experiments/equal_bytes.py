"""Every method at equal bytes: its quality where it takes 1/2 to 1/16 of what the full cache takes.

python -m experiments.equal_bytes              runs what is missing, into runs/equal_bytes, and sums it up
make docs                                      makes a page and a plot of the sum (docs/generate/equal_bytes.py)

What is compared stands in equal_bytes.toml, or in --settings; a family may name `shares` of its own there. A setting
is fitted by the bytes that it plans for a context of --length tokens, without room for answers, so that methods which
need more room beside are not favoured.
Seeds make other contexts; the windows of text are the same for all. A run that was stopped goes on where it was;
several processes can share the work by --families. --sum runs nothing and sums up what there is; --keep adds it to the
sum that stands there, where the records that made that one are no longer at hand.
"""

from __future__ import annotations

import argparse
import contextlib
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
from experiments.bench.common import integers, progress
from experiments.papers.common import run
from kvjax import KvjaxError, Model
from kvjax.eval.page.summary import first_later
from kvjax.eval.run import store
from kvjax.eval.run.equal_bytes import DTYPE, FittedMethod, fit_methods, parse_shares
from kvjax.eval.run.evaluate import evaluate
from kvjax.eval.run.machine import machine
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Case, Spec
from kvjax.eval.tasks.suite import split_words
from kvjax.generation.memory_plan import planned_bytes
from kvjax.models.config import Config

FAMILIES = Path(__file__).with_suffix(".toml")
RESULTS = Path(__file__).parent / "results" / "equal_bytes.json"
FULL = "full"
SEEDLESS = ("ppl",)  # tasks whose cases no seed changes
TASKS = ("niah", "ruler.vt", "turns", "ppl")
NEEDLES = ("niah", "niah.essays")  # tasks with a case for each depth


@dataclasses.dataclass(frozen=True)
class Point:
    """A method of a family at a share of the full cache's bytes; `method` is "" where none of its settings fits."""

    family: str
    settings: str  # as equal_bytes.toml has them
    share: str
    method: str
    device_bytes: int  # of one context, as planned
    host_bytes: int


def points(model: Model, shares: Sequence[Fraction], length: int, families: Path = FAMILIES) -> list[Point]:
    """All methods at all shares, or at those that their family names."""
    found = []
    for family in tomllib.loads(families.read_text())["family"]:
        own = parse_shares(family["shares"]) if "shares" in family else shares
        for settings in family["methods"]:
            each = fit_methods([s.strip() for s in settings.split(";")], own, model.config, length)
            for share in own:
                largest = max((f for f in each if f.share == share), key=lambda f: f.bytes)
                found.append(_point(model, family["name"], settings, largest, length))
    return found


def _point(model: Model, family: str, settings: str, fit: FittedMethod, length: int) -> Point:
    if not fit.method:
        return Point(family, settings, str(fit.share), "", 0, 0)
    held = planned_bytes(fit.method, model.config, length, dtype=DTYPE).held
    return Point(family, settings, str(fit.share), fit.method, held["device"], held["pinned_host"])


def measure(model: Model, family: str, methods: Sequence[str], args: argparse.Namespace) -> dict[str, str]:
    """Asks every method of a family all that its stores lack; returns what went wrong, by method."""
    wrong: dict[str, str] = {}
    for seed in args.seeds:
        progress(f"{family}, seed {seed}: {len(methods)} methods")
        with contextlib.ExitStack() as stack:
            cases, records = _opened(model, family, methods, seed, args, stack)
            how = {"batch": args.batch, "seed": seed}
            remaining = [method for method in methods if method not in wrong]
            try:
                evaluate(model, remaining, cases, records, **how)
            except KvjaxError:  # one by one, to find which it is
                for method in remaining:
                    try:
                        evaluate(model, [method], cases, records, **how)
                    except KvjaxError as e:
                        wrong[method] = str(e)
                        progress(f"failed: {e}")
    return wrong


def _opened(
    model: Model, family: str, methods: Sequence[str], seed: int, args: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[list[Case], store.Store]:
    """The cases of a seed, and the store of their answers."""
    tasks = [t for t in args.tasks if t not in SEEDLESS or seed == args.seeds[0]]
    spec = Spec((args.length,), args.contexts, args.questions, args.depths, seed, args.text)
    needles = dataclasses.replace(spec, contexts=max(args.contexts // args.depths, 1))  # one of each depth
    cases = [case for t in tasks for case in suite.cases(model, [t], needles if t in NEEDLES else spec)]
    about = {"seed": seed, "batch": args.batch, "question_aware": False}
    told = store.describe_run(model, **about, methods=methods, tasks=tasks, lengths=[args.length])
    return cases, stack.enter_context(store.open_store(_folder(args.out, family, seed), told))


def _folder(out: Path, family: str, seed: int) -> Path:
    return out / family.replace(" ", "_") / f"seed{seed}"


Scores = dict[str, dict[str, dict[str, list[float]]]]
"""method -> task -> seed -> the contexts' scores, 0 to 1, or bits per byte; of `turns` the later questions."""


def scores(families: Sequence[str], args: argparse.Namespace) -> Scores:
    """Those of all records, and of methods without records what an earlier sum holds, if it is kept.

    A method that was not yet asked everything is left out.
    """
    kept = earlier(args) if args.keep else {}
    found = recorded(families, args)
    asked = _counts(kept[FULL] if kept else found[FULL])
    return kept | {method: by_task for method, by_task in found.items() if _counts(by_task) == asked}


def earlier(args: argparse.Namespace) -> Scores:
    """Those of the sum that stands in --results; raises KvjaxError if it is of other contexts."""
    document = json.loads(args.results.read_text())
    for name, given in (("model", args.model), ("length", args.length), ("tasks", args.tasks), ("seeds", args.seeds)):
        if document[name] != given:
            raise KvjaxError(f"{args.results} has {name} {document[name]}, not {given}; leave out --keep")
    return document["scores"]


def recorded(families: Sequence[str], args: argparse.Namespace) -> Scores:
    """Those of all records, also of methods that were not yet asked everything."""
    found: Scores = {}
    for family, seed in itertools.product(families, args.seeds):
        folder = _folder(args.out, family, seed)
        of_seed: dict[tuple[str, str], list[float]] = {}
        for record in store.read(folder) if folder.exists() else []:
            of_seed.setdefault((record["method"], record["task"]), []).append(round(_score(record), 4))
        for (method, task), values in of_seed.items():
            found.setdefault(method, {}).setdefault(task, {})[str(seed)] = values
    return found


def _counts(by_task: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[tuple[str, str], int]:
    """How many contexts there are of each task and seed."""
    return {(task, seed): len(values) for task, by_seed in by_task.items() for seed, values in by_seed.items()}


def _score(record: Mapping[str, Any]) -> float:
    if record.get("bits") is not None:
        return record["bits"]
    return first_later(record)[1] if record["turns"] else float(np.mean(record["scores"]))


def sum_up(model: Model, every: Sequence[Point], wrong: Mapping[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """The document that the page is made of."""
    measured = [method for methods in by_family(every).values() for method in methods]
    return {
        "model": args.model,
        "length": args.length,
        "computed_in": model.dtype.name,
        "bytes_in": DTYPE,
        "tasks": list(args.tasks),
        "seeds": args.seeds,
        "full_bytes": planned_bytes(FULL, model.config, args.length, dtype=DTYPE).held["device"],
        "machine": machine(),
        "points": [dataclasses.asdict(point) for point in every],
        "bfloat16": {method: bfloat16_fractions(model.config, method, args.length) for method in measured},
        "scores": scores(list(by_family(every)), args),
        "failed": dict(wrong),
    }


def bfloat16_fractions(config: Config, method: str, length: int) -> tuple[float, float]:
    """What a method holds on the device and on the host, of the exact cache's bytes, both in bfloat16."""
    planned = planned_bytes(method, config, length, dtype=DTYPE)
    return planned.fraction_of_full, planned.host_fraction_of_full


def by_family(every: Sequence[Point]) -> dict[str, list[str]]:
    """The methods that are measured, by family; `full`, beside which all are seen, is one of its own."""
    families = {FULL: [FULL]}
    for point in every:
        families.setdefault(point.family, []).append(point.method)
    return {name: list(dict.fromkeys(filter(None, methods))) for name, methods in families.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="testbed", help="a checkpoint directory (default: the shipped model)")
    p.add_argument("--shares", default="1/2,1/4,1/8,1/16", help="of the bytes that the full cache takes")
    p.add_argument("--settings", type=Path, default=FAMILIES, help="what is compared (default: equal_bytes.toml)")
    p.add_argument("--families", type=split_words, help="only these of the settings, and no sum")
    p.add_argument("--sum", action="store_true", help="run nothing")
    p.add_argument("--keep", action="store_true", help="of methods without records, what --results holds already")
    p.add_argument("--tasks", type=split_words, default=list(TASKS))
    p.add_argument("--length", type=int, default=2048, help="tokens of a context")
    p.add_argument("--contexts", type=int, default=8, help="per task and seed; of needles, at all depths together")
    p.add_argument("--questions", type=int, default=4, help="per context, where a task has several")
    p.add_argument("--depths", type=int, default=4, help="places of a needle")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--seeds", type=integers, default=[0, 1, 2])
    p.add_argument("--text", type=Path, help="a UTF-8 text (default: held-out source code)")
    p.add_argument("--out", type=Path, default=Path("runs/equal_bytes"), help="the records")
    p.add_argument("--results", type=Path, default=RESULTS, help="their sum")
    args = p.parse_args(argv)
    model = kvjax.load(args.model)
    every = points(model, parse_shares(args.shares), args.length, args.settings)
    families = by_family(every)
    unknown = [name for name in args.families or () if name not in families]
    if unknown:
        raise KvjaxError(f"--families has {unknown[0]!r}; there are {', '.join(families)}")
    wrong: dict[str, str] = {}
    if not args.sum:
        for family in args.families or families:
            wrong |= measure(model, family, families[family], args)
    if args.sum or not args.families:
        args.results.write_text(json.dumps(sum_up(model, every, wrong, args)) + "\n")
        progress(f"wrote {args.results}")


if __name__ == "__main__":
    run(main)
