"""One self-contained HTML page of a run: table, plots, and the conditions of the run."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import markupsafe
import vl_convert

from kvjax.eval.page import charts, intervals, paired_difference, summary
from kvjax.eval.page.paired_difference import Difference
from kvjax.eval.page.summary import Record, Row
from kvjax.eval.run import store
from kvjax.eval.tasks import examples
from kvjax.utils import display
from kvjax.utils.files import write_text

PAGE, TEMPLATE = "report.html", "report.html.j2"
COSTS = (  # field, heading, unit, words, digits
    ("device_percent", "of full", "%", "bytes on the device, percent of the exact cache's, both in bfloat16", 1),
    ("device_bfloat16_kib", "device", "KiB", "KiB on the device per context, in bfloat16", 0),
    ("host_bfloat16_kib", "host", "KiB", "KiB in host memory per context, in bfloat16", 0),
    ("prefill_seconds", "prefill", "seconds", "seconds for the prompts of a batch", 2),
    ("tokens_per_second", "decode", "tokens/s", "decoded tokens per second, all sequences of a batch together", 0),
)


def write(directory: Path) -> Path:
    """Renders report.html from the directory's records.jsonl and run.json; returns its path.

    Raises:
      KvjaxError: there are no records, or a line is damaged; a torn last line is skipped.
    """
    records = read(directory)
    run = store.read_run(directory) if (directory / store.RUN).is_file() else {}
    return write_text(directory / PAGE, render(records, run))


def read(directory: Path) -> list[Record]:
    """Reads the records of a run, one per method and case, with the fields that the page needs."""
    return summary.latest({"about": {}} | r for r in store.read(directory))


def render(records: Sequence[Record], run: Mapping[str, Any]) -> str:
    """Renders the page's HTML, which holds its data and the library that draws them."""
    # Methods come as they were asked for, then methods of earlier runs.
    place = {m: i for i, m in enumerate(run.get("methods") or [])}
    rows = summary.rows(sorted(records, key=lambda r: place.get(r["method"], len(place))))
    methods = summary.distinct_values(rows, "method")
    lengths = summary.lengths(rows) or [None]
    page = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return page.get_template(TEMPLATE).render(
        run=run,
        title=f"{run.get('model', 'a model')}: {display.count(len(methods), 'method')}",
        headline=headline(rows, records, run),
        notes=examples.missing_example_notes((r["task"], r["about"]) for r in records),
        main=summary.main_length(rows),
        tables=[_table(rows, length) for length in lengths],
        pictures=[(p, p.chart.to_dict()) for p in charts.pictures(rows, records)],
        vega=_vega(),
        limits={
            "confidence": f"{100 * intervals.CONFIDENCE:.0f}%",
            "loss": f"{100 * paired_difference.TOLERATED_LOSS:.0f}",
            "loss_bits": paired_difference.TOLERATED_LOSS,
            "enough": paired_difference.ENOUGH_CONTEXTS,
        },
        environment=list(_flatten_run(run)),
    )


@functools.cache
def _vega() -> markupsafe.Markup:
    """The JavaScript that draws charts, as a script that sets `vegaEmbed`."""
    version = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
    bundle: Any = vl_convert.javascript_bundle  # its annotations ask for a snippet, which has a default
    return markupsafe.Markup(bundle(vl_version=version))


def headline(rows: Sequence[Row], records: Sequence[Record], run: Mapping[str, Any]) -> dict[str, Any]:
    """Sums up a run in plain words.

    Returns:
      what: the methods, tasks and contexts of the run.
      length: the main length.
      exact: the exact method's name, or None.
      fewest: pairs (memory, by method the tasks in which it takes the fewest bytes and keeps up with the exact one),
        empty where no task has enough contexts to tell.
      closest: of each task with enough contexts where no other method is shown to keep up with the exact one, the
        method with the smallest bound on its loss, and what was seen of it.
    """
    answered = [r for r in rows if r["task"] != summary.SPEED]
    methods, tasks = (summary.distinct_values(answered, f) for f in ("method", "task"))
    contexts, questions = (
        max((sum(r[field] for r in answered if r["method"] == m) for m in methods), default=0)
        for field in ("contexts", "questions")
    )
    what = f"{display.count(len(methods), 'method')} on {display.count(len(tasks), 'task')}"
    if lengths := summary.lengths(answered):
        ends = sorted({f"{n:,}": n for n in (lengths[0], lengths[-1])}.values())
        what += f", with contexts of {' to '.join(f'{n:,}' for n in ends)} tokens"
    what += f": {display.count(contexts, 'context')} and {display.count(questions, 'question')} for each method"
    main = summary.main_length(answered)
    recorded = paired_difference.RecordedRun(r for r in records if summary.length_of(r) in (main, None))
    together = ("device_percent", "host_percent")
    sizes = (("on the device", together[:1]), ("on device and host together", together))
    chosen = summary.at_length(rows, main)
    fewest = [(where, found) for where, fields in sizes if (found := _fewest_bytes(chosen, recorded, fields))]
    closest = _closest_methods(chosen, recorded)
    return {"what": what, "length": main, "exact": recorded.full, "fewest": fewest, "closest": closest}


def _fewest_bytes(
    rows: Sequence[Row], run: paired_difference.RecordedRun, fields: Sequence[str]
) -> list[dict[str, Any]]:
    """By method the tasks in which it takes the fewest bytes of all that keep up with the exact one."""

    def size(r: Row) -> float:
        return sum(r[f] or 0 for f in fields)

    fewest: dict[str, list[str]] = {}
    for task, against in _differences_to_full(rows, run).items():
        own = {r["method"]: size(r) for r in rows if r["task"] == task and r["device_percent"] is not None}
        good = [m for m in own if m == run.full or (m in against and paired_difference.keeps_up(against[m][0]))]
        fewest.setdefault(min(good, key=own.__getitem__), []).append(task)
    mean = {m: summary.mean_error(size(r) for r in rows if r["method"] == m)[0] for m in fewest}
    return [{"method": m, "tasks": tasks, "percent": mean[m]} for m, tasks in fewest.items()]


def _closest_methods(rows: Sequence[Row], run: paired_difference.RecordedRun) -> list[dict[str, str]]:
    found = []
    for task, against in _differences_to_full(rows, run).items():
        if not any(paired_difference.keeps_up(d) for d, _ in against.values()):
            lows = {m: -math.inf if d.low is None else d.low for m, (d, _) in against.items()}
            closest = max(lows, key=lows.__getitem__)  # of equal ones the first, with the fewest bytes
            seen = paired_difference.describe_loss(*against[closest])
            found.append({"task": task, "method": closest, "seen": seen})
    return found


def _differences_to_full(
    rows: Sequence[Row], run: paired_difference.RecordedRun
) -> dict[str, dict[str, tuple[Difference, str]]]:
    """By task with enough contexts: each method minus the exact one, in the first measure that the task has.

    Methods come with the fewest bytes on the device first.
    """
    found: dict[str, dict[str, tuple[Difference, str]]] = {}
    full = run.full
    if full is None:
        return found
    for task in summary.distinct_values(rows, "task"):
        own = {r["method"]: r["device_percent"] for r in rows if r["task"] == task and r["device_percent"] is not None}
        for method in sorted(own.keys() & run.cases.keys() - {full}, key=own.__getitem__):
            differences = ((run.difference(method, full, m, task), m.name) for m in paired_difference.MEASURES)
            if first := next(((d, name) for d, name in differences if d is not None), None):
                found.setdefault(task, {})[method] = first
    enough = paired_difference.ENOUGH_CONTEXTS
    return {task: all_ for task, all_ in found.items() if any(d.cases >= enough for d, _ in all_.values())}


def _table(rows: Sequence[Row], length: int | None) -> dict[str, Any]:
    """A table of the page: columns (heading, words, whether less is better), and each method's cells."""
    chosen = summary.at_length(rows, length)
    times = {r["method"]: r for r in rows if r["task"] == summary.SPEED and r["length"] == length}
    columns = [
        (task, name)
        for task in summary.distinct_values(chosen, "task")
        for name in ("score", "bits", "agreement")
        if any(r["task"] == task and r[name] is not None for r in chosen)
    ]
    body = []
    for method in summary.distinct_values(chosen or rows, "method"):
        own = {r["task"]: r for r in chosen if r["method"] == method}
        cost = summary.costs([*own.values()] or [times.get(method, dict.fromkeys(summary.FIELDS))])
        cells = []
        for task, name in columns:
            value = own[task][name] if task in own else None
            text = "–" if value is None else summary.format_value(value, name)
            interval = "" if value is None else summary.format_uncertainty(own[task], name)
            # The tint colors the cell's background, on a scale from 0 to 1 that bits per byte do not have.
            tint = None if value is None or name == "bits" else round(max(0.0, min(1.0, value)), 3)
            cells.append({"value": value, "text": text, "interval": interval, "tint": tint})
        for field, *_, digits in COSTS:
            text = "–" if cost[field] is None else f"{cost[field]:,.{digits}f}"
            cells.append({"value": cost[field], "text": text, "interval": "", "tint": None})
        body.append({"method": method, "cells": cells})
    heads = [{"text": t, "sub": _UNITS[n], "words": _WORDS[n], "less": n == "bits"} for t, n in columns]
    heads += [{"text": h, "sub": u, "words": w, "less": f != "tokens_per_second"} for f, h, u, w, _ in COSTS]
    return {"length": length, "heads": heads, "body": body}


_UNITS = {"score": "0 to 100", "bits": "bits/byte", "agreement": "% as full"}
_WORDS = {
    "score": "mean score, 0 to 100, and its 95% interval over contexts",
    "bits": "bits per byte of the text, less is better; below, how far above full on the same texts",
    "agreement": "tokens at which the likeliest one is that of full, in percent",
}


def _flatten_run(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields run.json as (name, text), with the machine's entries among the others."""
    for name, value in run.items():
        if isinstance(value, Mapping):
            yield from _flatten_run(value)
        elif isinstance(value, list):
            yield name, ("; " if name == "methods" else ", ").join(map(str, value))
        else:
            yield name, str(value)
