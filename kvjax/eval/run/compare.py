"""Comparison of methods on the same cases, from Python: `kvjax eval` without its page."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import Progress

from kvjax import processes
from kvjax.core.mesh import is_shared
from kvjax.errors import KvjaxError
from kvjax.eval.page import summary
from kvjax.eval.run import parts, store
from kvjax.eval.run.cells import make_cells
from kvjax.eval.run.comparison import Comparison
from kvjax.eval.run.evaluate import check_cases, evaluate
from kvjax.eval.run.parts import Part, parse_part
from kvjax.eval.run.progress import AnnouncedRows, describe_earlier, make_progress
from kvjax.eval.run.ray_workers import RayWorkers
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Spec, take_first
from kvjax.models.model import Model
from kvjax.registry.method_hash import method_hash
from kvjax.registry.strings import Methods, resolve
from kvjax.utils import arguments
from kvjax.utils.files import expand_user
from kvjax.utils.keywords import checks_keywords

TASKS = "niah,ppl"
QUICK = Spec(lengths=(512,), contexts=4, depths=5)
"""The default cases: about a minute on two cores for two methods and the shipped model."""


@checks_keywords
def compare(
    model: Model,
    methods: Methods,
    tasks: str | Sequence[str] = TASKS,
    spec: Spec = QUICK,
    out: str | Path | None = None,
    *,
    batch: int = 8,
    question_aware: bool = False,
    first: int | None = None,
    speed: bool = False,
    progress: bool | Progress | None = None,
    left_out: Callable[[str], None] | None = None,
    announce: Callable[[str], None] | None = None,
    part: Part | str | None = None,
    workers: RayWorkers | None = None,
) -> Comparison:
    """Asks every method all cases of the tasks.

    Args:
      model: from `kvjax.load`.
      methods: values, strings, or strings separated by ";". `full` among them is what others are compared with.
      tasks: names, or a string of names separated by ","; `kvjax eval --list` has them.
      spec: lengths of the contexts, how many, and their seed.
      out: a folder that keeps every answer, where a run that was stopped goes on; earlier records there have rows too,
        whether their cases are asked for again or not. By default nothing is kept. Of several processes that share
        the model's mesh, the first one alone writes there.
      batch: contexts at a time.
      question_aware: each question ends the prompt, so that a method sees it when it compresses.
      first: number of cases of each task and length that are asked, the first ones; by default all. Later calls with
        the same `out` can ask the others.
      speed: measure it too.
      progress: whether to show how far it is; by default on a terminal and in a notebook. A `rich` progress is used
        as it is.
      left_out: called with a line for each task that does not fit in a length, which is then left out.
      announce: called with lines for whoever waits: what `out` held before, unless there is a `first`, and each row
        after its first batch and when it is finished.
      part: asks a part of the cases only, such as "3/8", and keeps its answers in the folder `part-3-of-8` of `out`;
        `kvjax report` puts the parts together.
      workers: of `kvjax.eval.connect_ray`, which do the work in place of this process; the rows are the same.

    Returns:
      One row per method, task and length: `print` shows the table, `.plot()` quality against bytes, `.to_dicts()` and
      `.to_json()` the numbers.

    Raises:
      KvjaxError: before anything runs, for a method, task or length that cannot be.

    Example:
      >>> rows = kvjax.eval.compare(kvjax.load("testbed"), ["full", "snapkv:budget=64", "kivi:bits=2"])
      >>> print(rows)
      >>> rows.plot("comparison.png")
    """
    arguments.integer("batch", batch)
    method_names = list(resolve(methods))
    tasks = suite.expand(tasks, left_out)
    cases = suite.cases(model, tasks, spec, left_out)
    if first is not None:
        cases = take_first(cases, arguments.integer("first", first))
    options = {"seed": spec.seed, "batch": batch, "question_aware": question_aware}
    run = store.describe_run(model, **options, methods=method_names, tasks=tasks, lengths=spec.lengths)
    part = parse_part(part) if isinstance(part, str) else part
    if part is not None and out is None:
        raise KvjaxError(f"{part} needs a folder that keeps its answers; give out=..")
    out = None if out is None else expand_user(out)
    is_writer = not is_shared(model.mesh) or processes.is_writer()
    if out is not None and is_writer:
        parts.check_folder(out, part)
    check_cases(cases)
    lengths, content = spec.lengths if speed else (), b""
    cells = make_cells(cases, method_names, batch, lengths)
    if part is not None:
        hashes = {name: method_hash(method) for name, method in resolve(methods).items()}
        numbers = parts.assign_parts(cells, part.count, question_aware)
        content, run["part"] = parts.describe_cells(cells, numbers, part, hashes)
        cells = [cell for cell, number in zip(cells, numbers, strict=True) if number == part.number]
        assert out is not None  # a part without a folder was refused above
        out = out / part.folder
    if workers is not None:
        run |= workers.load(model)
    shown = progress if isinstance(progress, Progress) else make_progress(progress)
    if not is_writer:
        shown, announce = make_progress(False), None
    with contextlib.ExitStack() as stack:
        out = Path(out or stack.enter_context(tempfile.TemporaryDirectory(prefix="kvjax-")))
        records = stack.enter_context(store.open_store(out, run)) if is_writer else store.Follower()
        if announce is not None:
            if records.records and first is None:  # calls with `first` follow one another in one folder
                announce(describe_earlier(out, records.records))
            records.on_append = AnnouncedRows(records, cells, announce).note
        if part is not None and is_writer:
            parts.write_cells(out, content)
        evaluate(model, methods, cases, records, **options, speed=lengths, progress=shown, cells=cells, workers=workers)
        rows = summary.rows(records.records)
        return Comparison.of(processes.broadcast(rows) if is_shared(model.mesh) else rows)
