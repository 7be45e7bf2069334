"""The catalogue: every method on a real model at equal bytes, for the answer to "which method for me".

python -m experiments.catalogue [--only NAME] [--part 3/8] [--minutes 60]    runs what the records lack
python -m experiments.catalogue --only NAME --lines kvzip --tasks turns      ... of these lines and tasks
python -m experiments.catalogue --only NAME --repeat 5                       runs five lines again, drawn by lot
python -m experiments.catalogue_tables                                       prints what the records say

catalogue.toml declares the runs: models, lengths, fractions of the exact cache's bytes, tasks in the order of their
weight, and the methods of `equal_bytes` that they are asked of. A piece of work is one task and seed under a group of
methods, whose prompts are read once for all of them; seeds are the outer loop, so that every method has some contexts
before any has all. `results/catalogue/NAME.jsonl` has a line for each method, task and seed: the scores of its
contexts, and one for each machine. Each line is written as soon as it is known, a run goes on where the last one
ended, and parts (`--part`, for the tasks of a job array) write files of their own. `NAME.fitted.json` says which size
of each method takes which fraction. A run of the kind "forms" takes the sizes that are written, and counts what a cache
holds once half of a text is its prompt and half an answer, too. In a run of the kind "front" a method has a row as soon
as it has scores.

Methods that need a table of the model find one: those of the kinds in `tables` of a run are calibrated before it, once,
into kvjax's cache folder, on documentation and source code of Python's library, which no task asks about. Small ones
are kept with the records, so that a line of these can be repeated without the minutes or the hour that a table takes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pydoc_data.topics
import random
import re
import shutil
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kvjax
from experiments import equal_bytes
from experiments.bench.measuring import log_progress, make_parser
from experiments.papers.common import run_script
from experiments.tables.build import source_code
from kvjax import KvjaxError, Model
from kvjax.cache.calibration.table_file import TableFile
from kvjax.calibrate import calibrate
from kvjax.core.compile_cache import make_cache_directory
from kvjax.eval.run.cells import GROUP_METHODS, CellRunner, make_cells
from kvjax.eval.run.equal_bytes import DTYPE, parse_shares
from kvjax.eval.run.machine import machine
from kvjax.eval.run.parts import Part, parse_part
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Spec
from kvjax.generation.memory_plan import planned_bytes
from kvjax.utils.files import make_folder, replace_atomically

DECLARED = Path(__file__).with_suffix(".toml")
RESULTS = Path(__file__).parent / "results" / "catalogue"
MOST_KEPT_BYTES = 100_000  # of a table that is kept with the records
FULL = equal_bytes.FULL
FRONT, FORMS = "front", "forms"  # kinds of runs; the others ask every method at equal bytes
AS_WRITTEN = "1"  # the fraction of a run of forms
TABLE_SIZES = ("contexts", "tokens")  # of the text that a run's tables are calibrated on, and of each context


class Piece(NamedTuple):
    """What is evaluated at once, and recorded as a line for each method."""

    task: str
    seed: int
    methods: tuple[str, ...]


def read_declared(only: str | None) -> dict[str, Mapping[str, Any]]:
    """Reads the runs of catalogue.toml by name, or one of them; a run that is `like` an earlier one has its fields."""
    runs: dict[str, Mapping[str, Any]] = {}
    for run in tomllib.loads(DECLARED.read_text())["run"]:
        runs[run["name"]] = runs.get(run.get("like"), {}) | run
    if only is not None and only not in runs:
        raise KvjaxError(f"catalogue.toml has no run {only!r}; there are {', '.join(runs)}")
    return runs if only is None else {only: runs[only]}


def read_methods(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Reads the lines of a run, each with its family; those that a run has `added` come last."""
    families = tomllib.loads((DECLARED.parent / run["methods"]).read_text())["family"]
    lines = [(family["name"], line) for family in families for line in family["methods"]]
    return lines + [("added to the front", line) for line in run.get("added", ())]


def load_model(run: Mapping[str, Any], lines: Sequence[str]) -> Model:
    """Loads the model of a run. Methods find the tables of the run and no others, whoever runs it."""
    model = kvjax.load(run["model"])
    os.environ["KVJAX_TABLES"] = str(make_tables(model, run, lines))
    return model


def make_tables(model: Model, run: Mapping[str, Any], lines: Sequence[str]) -> Path:
    """Makes the tables that lines of a run need and that are not there yet; returns their folder for KVJAX_TABLES."""
    declared = run.get("tables", {"kinds": ()})
    settings = "".join(f".{declared[name]}" for name in TABLE_SIZES if name in declared)
    name = f"{re.sub(r'[^a-z0-9.-]+', '_', run['model'].lower())}{settings}"
    folder, kept_folder = make_cache_directory(f"tables/{name}"), RESULTS / "tables" / name
    if not declared["kinds"]:
        return folder
    needed = find_kinds([kvjax.parse(variant) for line in lines for variant in line.split(";")])
    for kind in declared["kinds"]:
        base = kind.partition(":")[0]
        path = folder / base / f"{kind}.safetensors"
        kept = kept_folder / base / f"{kind.replace(':', '.')}.safetensors"  # a name that every system takes
        if base not in needed or path.exists():
            continue
        make_folder(path.parent)
        if kept.exists():
            shutil.copyfile(kept, path)
            continue
        started = time.monotonic()
        try:
            calibrate(model, kind, path, calibration_documents(model, declared["contexts"], declared["tokens"]))
            log_progress(f"{run['name']}: a table of {kind}, {time.monotonic() - started:.0f} s")
        except KvjaxError as e:  # the methods that need it say so in `fit`
            log_progress(f"{run['name']}: no table of {kind}: {e}")
            continue
        if path.stat().st_size <= MOST_KEPT_BYTES:
            make_folder(kept.parent)
            shutil.copyfile(path, kept)
    return folder


def find_kinds(value: Any) -> set[str]:
    """Finds the kinds of table that methods read."""
    if isinstance(value, TableFile):
        return {value.kind}
    if isinstance(value, list | tuple):
        return {kind for item in value for kind in find_kinds(item)}
    if dataclasses.is_dataclass(value):
        return find_kinds([getattr(value, field.name) for field in dataclasses.fields(value)])
    return set()


def calibration_documents(model: Model, contexts: int, tokens: int) -> list[list[int]]:
    """Documents of which half are documentation and half source code of Python's library."""
    characters = 16 * tokens  # enough: a token has fewer in the mean
    of_code = contexts // 2
    of_topics = contexts - of_code
    topics = "\n\n".join(pydoc_data.topics.topics.values())
    stride = max((len(topics) - characters) // max(of_topics, 1), 1)
    texts = [topics[i * stride : i * stride + characters] for i in range(of_topics)]
    encode = model.text_tokenizer().encode_prompt
    return [encode(text)[:tokens] for text in [*texts, *source_code(of_code, characters)]]


def fit(model: Model, run: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Fits lines of a run to its fractions; what was fitted before is read, and what failed is tried again.

    Args:
      model: that of the run.
      run: a table of catalogue.toml.
      wanted: the lines to fit; others keep what they have.

    Returns:
      What `NAME.fitted.json` holds: the model, the dtype and bytes of its exact cache, and as `points` the fields of an
      `equal_bytes.Point` for each method and fraction, with `why` where a method cannot serve the model.
    """
    path, lines = fitted_path(run), read_methods(run)
    full = planned_bytes(FULL, model.config, run["length"], dtype=DTYPE).held["device"]
    about = {"model": run["model"], "length": run["length"], "full_bytes": full}
    about |= {"computed_in": model.dtype.name, "bytes_in": DTYPE}
    if run.get("tables", {}).get("kinds"):
        about["tables"] = {name: run["tables"][name] for name in TABLE_SIZES}
    # Sizes that were fitted before a run had tables are of methods that need none.
    known_about = about | {"points": []} | (read_fitted(run) if path.exists() else {})
    points = known_about.pop("points")
    if known_about != about:
        raise KvjaxError(
            f"{path} is of {known_about}, and the run {run['name']!r} of {about}; give the run another name"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    points = [p for p in points if (p["family"], p["settings"]) in lines]
    points = [p for p in points if "why" not in p or p["settings"] not in wanted]
    known = {(p["settings"], p["share"]) for p in points}
    for name, line in lines:
        declared = [AS_WRITTEN] if run.get("kind") == FORMS else run["shares"]
        shares = [share for share in declared if (line, share) not in known]
        if not shares or line not in wanted:
            continue
        try:
            if run.get("kind") == FORMS:
                points.append(measure_written(model, run["length"], name, line))
            else:
                fitted = equal_bytes.fit_line(model, parse_shares(",".join(shares)), run["length"], name, line)
                points += [dataclasses.asdict(point) for point in fitted]
        except KvjaxError as e:
            nothing = {"family": name, "settings": line, "method": "", "device_bytes": 0, "host_bytes": 0}
            points += [nothing | {"share": share, "why": str(e)} for share in shares]
        points.sort(key=lambda p: lines.index((p["family"], p["settings"])))
        log_progress(f"{run['name']}: fitted {line}")
        with replace_atomically(path) as file:
            file.write((json.dumps(about | {"points": points}, indent=0) + "\n").encode())
    return about | {"points": points}


def measure_written(model: Model, length: int, family: str, line: str) -> dict[str, Any]:
    """Counts the bytes of a method at the size that is written: the fields of a `Point`, and `answer_bytes`.

    `answer_bytes` are those on the device after an answer as long as its prompt, `length` tokens together.
    """
    held = planned_bytes(line, model.config, length, dtype=DTYPE).held
    point = equal_bytes.Point(family, line, AS_WRITTEN, line, held["device"], held["pinned_host"])
    answered = planned_bytes(line, model.config, length // 2, capacity=length, dtype=DTYPE).total["device"]
    return dataclasses.asdict(point) | {"answer_bytes": answered}


def fitted_path(run: Mapping[str, Any]) -> Path:
    """The file of what `fit` writes."""
    return RESULTS / f"{run['name']}.fitted.json"


def read_fitted(run: Mapping[str, Any]) -> dict[str, Any]:
    """Reads what `fit` wrote."""
    return json.loads(fitted_path(run).read_text())


def read_lines(name: str) -> list[dict[str, Any]]:
    """Reads the lines of a run, of all parts, without those of machines."""
    return [line for line in _read_files(name) if "method" in line]


def _read_files(name: str) -> list[dict[str, Any]]:
    of_run = re.compile(re.escape(name) + r"(\.\d+-of-\d+)?\.jsonl")
    paths = sorted(path for path in RESULTS.glob("*.jsonl") if of_run.fullmatch(path.name))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def sum_up(run: Mapping[str, Any]) -> dict[str, Any]:
    """Sums up the records of a run as a document of `experiments.equal_bytes`, which the pages are made of.

    A task and seed counts as soon as every method that is compared has it, so that all are compared on the same
    contexts: at equal bytes all methods of the run; among the front and among forms those that have begun the task.
    """
    fitted, lines = read_fitted(run), read_lines(run["name"])
    failed = {line["method"]: line["failed"] for line in lines if "failed" in line}
    methods = {FULL} | {p["method"] for p in fitted["points"] if p["method"]} - failed.keys()
    measured = {(x["task"], x["seed"], x["method"]): x["scores"] for x in lines if "scores" in x}
    tasks, seeds = [], set()
    scores: equal_bytes.Scores = {}
    for task in run["task"]:
        name, compared = task["name"], methods
        if run.get("kind") in (FRONT, FORMS):
            begun = {method for of_task, _, method in measured if of_task == name}
            compared = {FULL} | methods & begun
        complete = [seed for seed in get_seeds(run, task) if all((name, seed, m) in measured for m in compared)]
        if not complete:
            continue
        tasks.append(name)
        seeds |= set(complete)
        for method in sorted(compared):
            scores.setdefault(method, {})[name] = {str(seed): measured[name, seed, method] for seed in complete}
    sizes = {p["method"]: (p["device_bytes"], p["host_bytes"]) for p in fitted["points"] if p["method"]}
    sizes[FULL] = fitted["full_bytes"], 0
    machines = [line["machine"] for line in _read_files(run["name"]) if "machine" in line]
    return {
        **fitted,
        "tasks": tasks,
        "seeds": sorted(seeds),
        "machines": sorted({_name_machine(about) for about in machines}),
        "bfloat16": {method: [size / fitted["full_bytes"] for size in both] for method, both in sizes.items()},
        "scores": scores,
        "failed": {p["settings"]: p["why"] for p in fitted["points"] if "why" in p} | failed,
    }


def _name_machine(about: Mapping[str, Any]) -> str:
    return f"{about['processor']}, {about['cores']} cores, JAX {about['jax']}"


def make_pieces(run: Mapping[str, Any], methods: Sequence[str]) -> list[Piece]:
    """Divides a run into pieces, seeds outermost."""
    groups = [tuple(methods[i : i + GROUP_METHODS]) for i in range(0, len(methods), GROUP_METHODS)]
    pieces = []
    for seed in sorted({seed for task in run["task"] for seed in get_seeds(run, task)}):
        for task in run["task"]:
            if seed in get_seeds(run, task):
                pieces += [Piece(task["name"], seed, group) for group in groups]
    return pieces


def get_seeds(run: Mapping[str, Any], task: Mapping[str, Any]) -> range:
    """The seeds of a run's task; a front's `first_seed` leaves out the contexts that chose it."""
    first = run.get("first_seed", 0)
    return range(first, first + task["seeds"])


def leave_out_done(piece: Piece, lines: Sequence[Mapping[str, Any]]) -> Piece:
    """Leaves out the methods that have a line of this task and seed, or have failed at any."""
    done = {x["method"] for x in lines if "failed" in x or (x["task"], x["seed"]) == piece[:2]}
    return piece._replace(methods=tuple(m for m in piece.methods if m not in done))


def measure(runner: CellRunner, run: Mapping[str, Any], piece: Piece) -> Iterator[dict[str, Any]]:
    """Evaluates a piece; yields the line of a method as soon as all its contexts have been scored."""
    (task,) = (task for task in run["task"] if task["name"] == piece.task)
    sizes = {name: task[name] for name in ("contexts", "questions") if name in task}
    spec = Spec((run["length"],), seed=piece.seed, text=task.get("text"), **sizes)
    cases = suite.cases(runner.model, [piece.task], spec)
    scores: dict[str, list[float]] = {method: [] for method in piece.methods}
    for cell in make_cells(cases, piece.methods, run["batch"]):
        for method in cell.methods:
            if method not in scores:  # it has failed
                continue
            about = {"method": method, "task": piece.task, "seed": piece.seed}
            try:
                scores[method] += [round(equal_bytes.score(r), 4) for r in runner.run_method(cell, method)]
            except KvjaxError as e:
                del scores[method]
                yield about | {"failed": str(e)}
                continue
            if len(scores[method]) == len(cases):
                yield about | {"scores": scores[method]}


def run_missing(run: Mapping[str, Any], part: Part, until: float, in_lines: str = "", in_tasks: str = "") -> None:
    """Runs what the records of a run lack, in the lines and tasks that the patterns are found in, and `full`."""
    lines = [line for _, line in read_methods(run) if re.search(in_lines, line)]
    tasks = [task for task in run["task"] if re.search(in_tasks, task["name"])]
    for what, pattern, found in (("line", in_lines, lines), ("task", in_tasks, tasks)):
        if not found:
            log_progress(f"{run['name']}: {pattern!r} is found in no {what}")
            return
    model = load_model(run, lines)
    points = [point for point in fit(model, run, lines)["points"] if point["settings"] in lines]
    methods = [FULL, *dict.fromkeys(point["method"] for point in points if point["method"])]
    runner = CellRunner(model, methods)
    suffix = f".{part.number}-of-{part.count}" if part.count > 1 else ""
    path = RESULTS / f"{run['name']}{suffix}.jsonl"
    pieces = make_pieces(run | {"task": tasks}, methods)[part.number - 1 :: part.count]
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    is_known = any("machine" in x and _name_machine(x["machine"]) == _name_machine(machine()) for x in known)
    for number, whole in enumerate(pieces, 1):
        piece = leave_out_done(whole, read_lines(run["name"]))
        if not piece.methods:
            continue
        if time.monotonic() > until:
            log_progress(f"{run['name']}: {number - 1} of {len(pieces)} pieces are done; the next run goes on")
            return
        started = time.monotonic()
        for line in measure(runner, run, piece):
            with path.open("a") as file:
                if not is_known:  # a run may go on on another machine
                    file.write(json.dumps({"machine": machine()}) + "\n")
                    is_known = True
                file.write(json.dumps(line) + "\n")
        log_progress(
            f"{run['name']}: piece {number} of {len(pieces)}, {piece.task}, seed {piece.seed}, "
            f"{len(piece.methods)} methods, {time.monotonic() - started:.0f} s"
        )


def repeat(run: Mapping[str, Any], count: int) -> None:
    """Measures lines of a run again, drawn by lot, and prints both scores; another machine may round some apart."""
    recorded = [line for line in read_lines(run["name"]) if "scores" in line]
    drawn = random.sample(recorded, min(count, len(recorded)))
    methods = [line["method"] for line in drawn]
    runner = CellRunner(load_model(run, methods), methods)
    for line in drawn:
        about = f"{line['method']}, {line['task']}, seed {line['seed']}"
        (again,) = measure(runner, run, Piece(line["task"], line["seed"], (line["method"],)))
        if "failed" in again:
            print(f"{about}: it failed: {again['failed']}", flush=True)
            continue
        before, now = line["scores"], again["scores"]
        differing = sum(a != b for a, b in zip(before, now, strict=True))
        means = f"recorded {sum(before) / len(before):.4f}, again {sum(now) / len(now):.4f}"
        print(f"{about}: {means}, {differing} of {len(before)} contexts differ", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    p = make_parser(__doc__)
    p.add_argument("--only", help="one run of catalogue.toml (default: all, in order)")
    p.add_argument("--part", type=parse_part, default=Part(1, 1), help="such as 3/8: a part of the pieces")
    p.add_argument("--minutes", type=float, default=math.inf, help="begin no piece after these")
    p.add_argument("--lines", default="", metavar="PATTERN", help="a regular expression (default: all lines)")
    p.add_argument("--tasks", default="", metavar="PATTERN", help="a regular expression (default: all tasks)")
    p.add_argument("--repeat", type=int, metavar="N", help="run N lines of the records again, and print both scores")
    args = p.parse_args(argv)
    if args.repeat:
        for run in read_declared(args.only).values():
            repeat(run, args.repeat)
        return
    until = time.monotonic() + 60 * args.minutes
    for run in read_declared(args.only).values():
        run_missing(run, args.part, until, args.lines, args.tasks)


if __name__ == "__main__":
    run_script(main)
