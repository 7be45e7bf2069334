"""A run: every method on every case, cell by cell (`cells`), recorded as it goes."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.progress import Progress

import kvjax
from kvjax import processes
from kvjax.cache.protocol import KVMethod
from kvjax.core.mesh import is_shared
from kvjax.errors import KvjaxError
from kvjax.eval.run.cells import Cell, CellRunner, fingerprint, make_cells, name_failures
from kvjax.eval.run.ray_workers import RayWorkers
from kvjax.eval.run.store import Store
from kvjax.eval.tasks.case import Case
from kvjax.eval.tasks.metrics import METRICS
from kvjax.generation.memory_plan import planned_bytes
from kvjax.models.model import Model
from kvjax.registry.strings import Methods
from kvjax.utils.mesh_context import leaves_callers_mesh


@leaves_callers_mesh
def evaluate(
    model: Model,
    methods: Methods,
    cases: Sequence[Case],
    store: Store,
    *,
    batch: int = 8,
    question_aware: bool = False,
    speed: Sequence[int] = (),
    seed: int = 0,
    progress: Progress | None = None,
    cells: Sequence[Cell] | None = None,
    workers: RayWorkers | None = None,
) -> None:
    """Appends to the store one record per method and case that it lacks, a batch at a time; greedy, deterministic.

    Args:
      model: from `kvjax.load`.
      methods: values, strings, or strings separated by ";"; a string is recorded as it is, and a value under the
        string that makes it (`kvjax.name_of`).
      cases: the cases of all tasks.
      store: the records; where the model's mesh is shared by several processes, those of the one that writes, whose
        list of work is that of all, and a `Follower` in the others.
      batch: contexts at a time.
      question_aware: whether each question ends the prompt (`harness.ask_question_aware`); cases with `turns` are
        conversations in any case.
      speed: context lengths, in tokens, at which speed is measured.
      seed: of the contexts of speed measurements.
      progress: shows how far the run is.
      cells: those of the run's `make_cells` to run, in order; by default all.
      workers: of `connect_ray`, which run the cells in place of this process; they have loaded `model`.

    Raises:
      KvjaxError: before anything runs, for a method or case that cannot run; later, for a batch that fails. The
        records before it stay, and with workers those of all other batches.
    """
    runner = CellRunner(model, methods, question_aware=question_aware, seed=seed)
    check_methods(model, runner.methods, [len(c.context) for c in cases] + list(speed))
    check_cases(cases)
    fingerprints = {(c.task, c.key): fingerprint(c) for c in cases}
    if is_shared(model.mesh):
        options = {"batch": batch, "question_aware": question_aware, "speed": [*speed], "seed": seed}
        processes.require_agreement(kvjax=kvjax.__version__, methods=runner.hashes, cases=fingerprints, options=options)
        processes.require_agreement(weights=model.fingerprint)
    check_records(store.records, runner.hashes, fingerprints)
    all_cells = make_cells(cases, list(runner.methods), batch, speed) if cells is None else cells
    cells = missing_cells(all_cells, store)
    if is_shared(model.mesh):
        # Only the process that writes knows which records exist.
        methods_left = dict(processes.broadcast([(cell.index, cell.methods) for cell in cells]))
        cells = [
            dataclasses.replace(cell, methods=tuple(methods_left[cell.index]))
            for cell in all_cells
            if cell.index in methods_left
        ]
    tokens = {cell.index: cell.count_tokens(question_aware) for cell in cells}
    with Progress(disable=True) if progress is None else progress as bar:
        whole = bar.add_task("all", total=sum(tokens[cell.index] * len(cell.methods) for cell in cells))
        if workers is not None:
            options = {"question_aware": question_aware, "seed": seed}
            for cell, records in workers.run(cells, runner.methods, runner.hashes, **options):
                store.append(records)
                bar.advance(whole, tokens[cell.index] * len(cell.methods))
            return
        work = [(cell, name) for cell in cells for name in cell.methods]
        for (name, task), part in itertools.groupby(work, key=lambda w: (w[1], w[0].task)):
            todo = [cell for cell, _ in part]
            line = bar.add_task(f"{name}: {task}", total=sum(tokens[cell.index] for cell in todo))
            for cell in todo:
                # After each method rather than each cell, so that a kill loses no more than it must.
                store.append(runner.run_method(cell, name))
                bar.advance(line, tokens[cell.index])
                bar.advance(whole, tokens[cell.index])
            bar.remove_task(line)


def missing_cells(cells: Iterable[Cell], store: Store) -> list[Cell]:
    """Returns the cells that the store lacks records of, each with those of its methods alone."""

    def lacks(cell: Cell, name: str) -> bool:
        return not all(store.find(name, c.task, c.key) for c in cell.batch.cases)

    restricted = [(cell, tuple(name for name in cell.methods if lacks(cell, name))) for cell in cells]
    return [dataclasses.replace(cell, methods=methods) for cell, methods in restricted if methods]


def check_methods(model: Model, methods: Mapping[str, KVMethod], lengths: Sequence[int]) -> None:
    """Raises KvjaxError for a method that cannot run on this model with contexts of such lengths."""
    for name, method in methods.items():
        with name_failures(f"method {name!r} cannot run on {model.name or 'this model'}"):
            # A method's limits concern the shortest or the longest context.
            for n in {min(lengths, default=1), max(lengths, default=1)}:
                planned_bytes(method, model.config, n, dtype=model.dtype)


def check_cases(cases: Sequence[Case]) -> None:
    """Raises KvjaxError for a case that is incomplete, or whose metric is unknown or lacks a package."""
    names = collections.Counter((c.task, c.key) for c in cases)
    for c in cases:
        if names[c.task, c.key] > 1:
            problem = "is made more than once; a key names one instance"
        elif (c.follows is None) == (not c.asks):
            problem = "needs either questions or a text that follows, and not both"
        elif c.follows is not None and not (c.bytes and len(c.follows)):
            problem = f"has {len(c.follows)} tokens and {c.bytes} bytes to follow; give some"
        elif unknown := [a.metric for a in c.asks if a.metric not in METRICS]:
            problem = f"asks for metric {unknown[0]!r}; there are {', '.join(METRICS)}"
        elif not all(len(a.prompt) and a.new_tokens > 0 and a.references for a in c.asks):
            problem = "has a question without prompt, tokens to answer, or reference"
        else:
            continue
        raise KvjaxError(f"case {c.key!r} {problem}")
    for a in {a.metric: a for c in cases for a in c.asks}.values():
        METRICS[a.metric]("", a)  # a missing library is named now, and not after an hour


def check_records(
    records: Iterable[Mapping[str, Any]], hashes: Mapping[str, str], fingerprints: Mapping[tuple[str, str], str]
) -> None:
    """Raises KvjaxError for a record that was made of another method, or of another case, under the same name."""
    for r in records:
        if r.get("method_hash") and r["method_hash"] != hashes.get(r["method"], r["method_hash"]):
            changed = f"{r['method']!r} is not the method that was recorded under this name: its code, values, table"
        elif fingerprints.get((r["task"], r["key"])) not in (None, r.get("case")):
            changed = (
                f"case {r['key']!r} is not the one that was recorded under this key: its questions, depths, text, data"
            )
        else:
            continue
        raise KvjaxError(f"{changed} or the version of kvjax have changed. Choose another --out, or delete the old one")
