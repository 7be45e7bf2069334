"""One self-contained HTML page of a run: table, plots, the orders expected from the papers, and how it was run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.errors import KvjaxError
from kvjax.eval.page import paired_difference, paper_claims, plots, safe_write, summary
from kvjax.eval.page.paper_claims import Finding
from kvjax.eval.page.summary import Record, Row
from kvjax.eval.run import store
from kvjax.eval.tasks import examples

PAGE, TEMPLATE = "report.html", "report.html.j2"
COSTS = (  # field, heading, unit, words, digits
    ("device_percent", "of full", "%", "bytes held on the device, percent of the exact cache's, both in bfloat16", 1),
    ("device_kib", "device", "KiB", "KiB held on the device per context, in the model's dtype", 0),
    ("host_kib", "host", "KiB", "KiB held in host memory per context, in the model's dtype", 0),
    ("prefill_seconds", "prefill", "seconds", "seconds for the prompts of a batch", 2),
    ("tokens_per_second", "decode", "tokens/s", "decoded tokens per second, all rows of a batch together", 0),
)


def write(directory: Path) -> Path:
    """Renders report.html from the directory's records.jsonl and run.json; returns its path.

    Raises KvjaxError without records, and for a damaged line (its number is named; a torn last one is left out).
    """
    directory = Path(directory)
    records = read(directory)
    run = store.read_run(directory) if (directory / store.RUN).is_file() else {}
    return safe_write.write(directory / PAGE, render(records, run))


def read(directory: Path) -> list[Record]:
    """The records of a run, one per method and case, with what the page needs; raises KvjaxError without any."""
    found = [{"scores": [], "about": {}, "bytes": {}} | r for r in store.read(directory)]
    if not found:
        raise KvjaxError(
            f"{directory} holds no records yet; run `kvjax eval --out {directory}` again, it goes on from there"
        )
    return summary.latest(found)


def render(records: Sequence[Record], run: Mapping[str, Any]) -> str:
    """The page's HTML. Raises KvjaxError where jinja2 is not installed."""
    try:
        import jinja2
        import markupsafe
    except ImportError as e:
        raise KvjaxError("the report needs jinja2; pip install 'kvjax[eval]'") from e
    rows = summary.rows(_in_order(records, run.get("methods") or []))
    lengths = summary.lengths(rows) or [None]
    drawn = plots.plots(rows, records)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    look = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    page = jinja2.Environment(loader=loader, **look)
    page.filters["breaks"] = lambda text: markupsafe.Markup(re.sub("([,.:])", r"\1<wbr>", str(markupsafe.escape(text))))
    return page.get_template(TEMPLATE).render(
        run=run,
        title=f"{run.get('model', 'a model')}: {_count(len(summary.ordered(rows, 'method')), 'method')}",
        headline=headline(rows, records, run),
        notes=examples.missing_example_notes((r["task"], r["about"]) for r in records),
        lengths=lengths,
        main=summary.main_length(rows),
        tables=[_table(rows, length) for length in lengths],
        figures=[
            (p, [(a.title, markupsafe.Markup(svg)) for a, svg in zip(p.panels, plots.svgs(p), strict=True)])
            for p in drawn
        ],
        legend=[
            (m, markupsafe.Markup(plots.glyph(s))) for m, s in plots.styles(summary.ordered(rows, "method")).items()
        ],
        scale=plots.SCALE,
        findings=_by_claim(paper_claims.check(rows, records)),
        limits={
            "errors": paper_claims.ERRORS,
            "near": f"{100 * paper_claims.NEAR:.0f}",
            "near_bits": paper_claims.NEAR,
            "loss": f"{100 * paired_difference.LOSS:.0f}",
            "loss_bits": paired_difference.LOSS,
            "enough": paired_difference.ENOUGH,
        },
        environment=list(_environment(run)),
        columns=COSTS,
    )


def _in_order(records: Sequence[Record], methods: Sequence[str]) -> list[Record]:
    """With the methods as they were asked for, those that were not behind."""
    place = {m: i for i, m in enumerate(methods)}
    return sorted(records, key=lambda r: place.get(r["method"], len(place)))


def headline(rows: Sequence[Row], records: Sequence[Record], run: Mapping[str, Any]) -> dict[str, Any]:
    """In plain words what was run, and which methods answer as the exact one in the fewest bytes.

    Keys: what; length, the main one; exact, the exact method's name or None; fewest: pairs (bytes of what, by method
    the tasks in which it takes the fewest), empty where no task has enough contexts to tell.
    """
    answered = [r for r in rows if r["task"] != summary.SPEED]
    methods, tasks = (summary.ordered(answered, f) for f in ("method", "task"))

    def most(field: str) -> int:
        return max((sum(r[field] for r in answered if r["method"] == m) for m in methods), default=0)

    what = f"{_count(len(methods), 'method')} on {_count(len(tasks), 'task')}"
    if lengths := summary.lengths(answered):
        ends = sorted({f"{n:,}": n for n in (lengths[0], lengths[-1])}.values())
        what += f", with contexts of {' to '.join(f'{n:,}' for n in ends)} tokens"
    what += f": {_count(most('contexts'), 'context')} and {_count(most('questions'), 'question')} for each method"
    main = summary.main_length(answered)
    exact = paper_claims.Run(r for r in records if summary.length_of(r) in (main, None))
    together = ("device_percent", "host_percent")
    sizes = (("on the device", together[:1]), ("on device and host together", together))
    chosen = summary.at_length(rows, main)
    fewest = [(where, found) for where, fields in sizes if (found := _fewest(chosen, exact, fields))]
    return {"what": what, "length": main, "exact": exact.full, "fewest": fewest}


def _fewest(rows: Sequence[Row], run: paper_claims.Run, fields: Sequence[str]) -> list[dict[str, Any]]:
    """By method the tasks in which it takes the fewest bytes of all that keep up with the exact one."""

    def size(r: Row) -> float:
        return sum(r[f] or 0 for f in fields)

    found: dict[str, list[str]] = {}
    for task in summary.ordered(rows, "task") if run.full else ():
        own = {r["method"]: size(r) for r in rows if r["task"] == task and r["device_percent"] is not None}
        against = {m: _difference(run, m, task) for m in own}
        if any(d and d.cases >= paired_difference.ENOUGH for d in against.values()):
            good = [m for m, d in against.items() if m == run.full or (d and paired_difference.keeps_up(d))]
            found.setdefault(min(good, key=own.__getitem__), []).append(task)
    mean = {m: summary.mean_error(size(r) for r in rows if r["method"] == m)[0] for m in (*found, run.full)}
    return [{"method": m, "tasks": tasks, "percent": mean[m]} for m, tasks in found.items()]


def _difference(run: paper_claims.Run, method: str, task: str) -> paired_difference.Difference | None:
    """A method beside the exact one, in the first measure that a task has; None for the exact one itself."""
    if method not in run.cases or run.full is None or method == run.full:
        return None
    found = (run.difference(method, run.full, value, task) for _, value in paper_claims.MEASURES)
    return next((d for d in found if d), None)


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")


def _table(rows: Sequence[Row], length: int | None) -> dict[str, Any]:
    """A table of the page: columns (heading, words, whether less is better), and per method its cells."""
    chosen = summary.at_length(rows, length)
    times = {r["method"]: r for r in rows if r["task"] == summary.SPEED and r["length"] == length}
    columns = [
        (task, name)
        for task in summary.ordered(chosen, "task")
        for name in ("score", "bits", "agreement")
        if any(r["task"] == task and r[name] is not None for r in chosen)
    ]
    body = []
    for method in summary.ordered(chosen or rows, "method"):
        own = {r["task"]: r for r in chosen if r["method"] == method}
        cost = summary.costs([*own.values()] or [times.get(method, dict.fromkeys(summary.FIELDS))])
        cells = [_cell(own.get(task), name) for task, name in columns]
        cells += [_number(cost[field], digits) for field, *_, digits in COSTS]
        body.append({"method": method, "cells": cells})
    heads = [{"text": t, "sub": _SUB[n], "words": _WORDS[n], "less": n == "bits"} for t, n in columns]
    heads += [{"text": h, "sub": u, "words": w, "less": f != "tokens_per_second"} for f, h, u, w, _ in COSTS]
    return {"length": length, "heads": heads, "body": body}


_SUB = {"score": "0 to 100", "bits": "bits/byte", "agreement": "% as full"}
_WORDS = {
    "score": "mean score, 0 to 100, and its standard error over contexts",
    "bits": "bits per byte of the text, less is better",
    "agreement": "share of tokens at which the likeliest one is that of full, in percent",
}


def _cell(row: Row | None, name: str) -> dict[str, Any]:
    if row is None or row[name] is None:
        return {"value": None, "text": "–", "error": "", "share": None}
    value, error = row[name], row[f"{name}_error"]
    show = (lambda x: f"{x:.3f}") if name == "bits" else (lambda x: f"{100 * x:.1f}")
    share = None if name == "bits" else round(max(0.0, min(1.0, value)), 3)
    return {"value": value, "text": show(value), "error": "" if error is None else show(error), "share": share}


def _number(value: float | None, digits: int) -> dict[str, Any]:
    text = "–" if value is None else f"{value:,.{digits}f}"
    return {"value": value, "text": text, "error": "", "share": None}


def _by_claim(findings: Sequence[Finding]) -> list[tuple[str, list[dict[str, Any]]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for f in findings:
        parts = [(task, paper_claims.signed(d, f.measure)) for task, d in f.parts]
        found.setdefault(f.claim, []).append({"finding": f, "parts": parts, "kind": f.verdict.replace(" ", "-")})
    return list(found.items())


def _environment(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """run.json as (name, text), the machine's entries among the others."""
    for name, value in run.items():
        if isinstance(value, Mapping):
            yield from _environment(value)
        elif isinstance(value, list):
            yield name, ("; " if name == "methods" else ", ").join(map(str, value))
        else:
            yield name, str(value)
