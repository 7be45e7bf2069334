"""Methods beside each other on the same cases, from Python: what `kvjax eval` does without its page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from kvjax.eval.page import summary
from kvjax.eval.run import store
from kvjax.eval.run.evaluate import evaluate
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Spec
from kvjax.methods.strings import Methods, named
from kvjax.models.model import Model


def compare(
    model: Model,
    methods: Methods,
    tasks: str | Sequence[str],
    spec: Spec,
    out: str | Path,
    *,
    batch: int = 8,
    seen: bool = False,
    speed: bool = False,
    progress: Progress | None = None,
    left_out: Callable[[str], None] | None = None,
    rebuild: bool = False,
) -> list[dict[str, Any]]:
    """Asks every method all cases of the tasks -> one row per (method, task, length).

    methods: values, strings, or strings separated by ";", as in `kvjax.eval.run.evaluate.evaluate`. tasks: names, or
    a string of names separated by ",". The rows are those of `kvjax.eval.page.summary.rows`. Every answer is kept in
    the folder `out`, where a run that was stopped goes on; what was recorded there before has its rows too, whether it
    is asked for again or not. seen: each question ends the prompt, so that a method sees it when it compresses; speed:
    measure it too. left_out: is told of tasks that do not fit in a length, which are then left out. rebuild: go on with
    records whose run.json is damaged or missing. Raises KvjaxError before anything runs for a method, task or length
    that cannot be.
    """
    chosen = named(methods)
    tasks = suite.expand(tasks)
    cases = suite.cases(model, tasks, spec, left_out)
    about = {"seed": spec.seed, "batch": batch, "seen": seen}
    run = store.describe(model, **about, methods=list(chosen), tasks=tasks, lengths=spec.lengths)
    times = spec.lengths if speed else ()
    with store.opened(out, run, rebuild) as records:
        evaluate(model, methods, cases, records, **about, speed=times, progress=progress)
    return summary.rows(store.read(out))
