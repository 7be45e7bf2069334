"""A run as a table: one row per method, task and length, from the records of its cases."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from kvjax.eval.page import safe_write

Record = Mapping[str, Any]
Row = dict[str, Any]

REFERENCE = "full"  # what `agreement` compares with
SPEED = "speed"  # the task whose records hold times and no answers
FIELDS = (
    *("method", "task", "length", "metric", "turns", "contexts", "questions", "score", "score_error"),
    *("first", "first_error", "later", "later_error", "bits", "bits_error", "agreement", "agreement_error"),
    *("device_percent", "host_percent", "device_kib", "host_kib", "room_kib", "dtype"),
    *("prefill_seconds", "tokens_per_second"),
)


SIZES = ("device_percent", "host_percent", "device_kib", "host_kib", "room_kib")


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per (method, task, length), methods and tasks as they first appear, lengths ascending; keys: FIELDS.

    score, first, later: 0 to 1, means over the cases of each case's mean. *_error: standard errors over cases. first,
    later: the first question of each context and the others, where there are several. agreement: share of equal
    `likeliest` tokens with the method "full". *_percent: bytes held, of those of the exact cache, both in bfloat16.
    *_kib: measured, per context, in `dtype`, of the tokens that are held; room_kib: of both memories, for the tokens
    that follow. What was not measured is None.
    """
    kept = latest(records)
    speeds = _group((r for r in kept if r["task"] == SPEED), lambda r: (r["method"], length_of(r)))
    best = {_case(r): r["likeliest"] for r in kept if r["method"] == REFERENCE and r.get("likeliest")}
    methods, tasks = ordered(kept, "method"), ordered(kept, "task")

    def place(key: tuple) -> tuple[int, int, int]:
        return (methods.index(key[0]), tasks.index(key[1]), key[2] or 0)

    cases = _group(kept, lambda r: (r["method"], r["task"], length_of(r)))
    return [_row(key, cases[key], best, speeds.get((key[0], key[2]), [])) for key in sorted(cases, key=place)]


def latest(records: Iterable[Record]) -> list[Record]:
    """Without repetitions: of several records of a method and case the last counts."""
    return list({(r["method"], *_case(r)): r for r in records}.values())


def ordered(items: Iterable[Record], field: str) -> list[Any]:
    """The values of a field in the order of their first appearance."""
    return list(dict.fromkeys(r[field] for r in items))


def length_of(record: Record) -> int | None:
    """The length that was asked for, in tokens; None where the data decide."""
    return record.get("about", {}).get("length")


def turns_of(record: Record) -> list[int]:
    """Which of a context's questions each is: 0 for the first."""
    asks = record.get("asks") or [{}] * len(record["scores"])
    return [ask.get("turn", i) for i, ask in enumerate(asks)]


def first_later(record: Record) -> tuple[float, float] | None:
    """Mean score of a context's first question and of the later ones; None without later ones."""
    first, later = [], []
    for turn, score in zip(turns_of(record), record["scores"], strict=True):
        (later if turn else first).append(score)
    return (float(np.mean(first)), float(np.mean(later))) if first and later else None


def mean_error(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """(mean, its standard error) of the values that there are; the error of a single one is None."""
    found = [v for v in values if v is not None and math.isfinite(v)]
    if not found:
        return None, None
    error = float(np.std(found, ddof=1)) / math.sqrt(len(found)) if len(found) > 1 else None
    return float(np.mean(found)), error


def _case(record: Record) -> tuple[str, str]:
    return record["task"], record["key"]


def _group(records: Iterable[Record], key) -> dict[Any, list[Record]]:
    groups: dict[Any, list[Record]] = {}
    for r in records:
        groups.setdefault(key(r), []).append(r)
    return groups


def _row(key: tuple, cases: Sequence[Record], best: Mapping, speeds: Sequence[Record]) -> Row:
    method, task, length = key
    split = [first_later(r) for r in cases]
    found = {
        "score": mean_error(np.mean(r["scores"]) if r["scores"] else None for r in cases),
        "first": mean_error(s[0] if s else None for s in split),
        "later": mean_error(s[1] if s else None for s in split),
        "bits": mean_error(r.get("bits") for r in cases),
        "agreement": mean_error(_agreement(r, best) for r in cases),
    }
    row: Row = dict.fromkeys(FIELDS)
    row |= {"method": method, "task": task, "length": length, "metric": cases[0].get("metric")}
    row |= {"turns": any(r.get("turns", False) for r in cases), "contexts": len(cases)}
    row["questions"] = sum(len(r["scores"]) for r in cases)
    for name, (mean, error) in found.items():
        row |= {name: mean, f"{name}_error": error}
    for name, kind in (("device_kib", "device"), ("host_kib", "pinned_host")):
        size, _ = mean_error(r.get("bytes", {}).get(kind) for r in cases)
        row[name] = None if size is None else size / 1024
        fraction, _ = mean_error(r.get("bfloat16_fraction", {}).get(kind) for r in cases)
        row[name.replace("kib", "percent")] = None if fraction is None else round(100 * fraction, 3)
    row["dtype"] = next((r["dtype"] for r in cases if "dtype" in r), None)
    room, _ = mean_error(sum(r["room"].values()) for r in cases if "room" in r)
    row["room_kib"] = None if room is None else room / 1024
    for name in ("prefill_seconds", "tokens_per_second"):
        row[name], _ = mean_error(r.get(name) for r in speeds)
    return row


def _agreement(record: Record, best: Mapping) -> float | None:
    other = best.get(_case(record))
    if not other or not record.get("likeliest"):
        return None
    return float(np.mean([a == b for a, b in zip(record["likeliest"], other, strict=False)]))


def lengths(rows: Iterable[Row]) -> list[int]:
    """All lengths, ascending."""
    return sorted({r["length"] for r in rows if r["length"] is not None})


def main_length(rows: Iterable[Row]) -> int | None:
    """The length at which most tasks were measured, the largest of several."""
    rows = [r for r in rows if r["task"] != SPEED]

    def tasks(n: int) -> int:
        return len({r["task"] for r in rows if r["length"] == n})

    return max(lengths(rows), key=lambda n: (tasks(n), n), default=None)


def at_length(rows: Iterable[Row], length: int | None) -> list[Row]:
    """The rows of one length and those without one; speed apart."""
    return [r for r in rows if r["task"] != SPEED and r["length"] in (length, None)]


def family(task: str) -> str:
    """The group that a task belongs to: "ruler" for "ruler.vt"."""
    return task.partition(".")[0]


def by_family(rows: Iterable[Row]) -> list[Row]:
    """Rows of one length with the tasks of a family averaged (`task` names the family); first of all methods' order.

    Errors are those of a mean over fixed tasks. A method that lacks a task of a family has no row for it.
    """
    rows = [r for r in rows if r["task"] != SPEED]
    tasks = {
        name: {r["task"] for r in rows if family(r["task"]) == name} for name in map(family, ordered(rows, "task"))
    }
    groups = _group(rows, lambda r: (r["method"], family(r["task"])))
    whole = {k: g for k, g in groups.items() if len(g) == len(tasks[k[1]])}
    return [_merged(key, group) for key, group in whole.items()]


def _merged(key: tuple[str, str], group: Sequence[Record]) -> Row:
    row = dict(group[0]) | {"method": key[0], "task": key[1]}
    row |= {name: sum(r[name] for r in group) for name in ("contexts", "questions")}
    row["turns"] = any(r["turns"] for r in group)
    for name in ("score", "first", "later", "bits", "agreement"):
        row[name], _ = mean_error(r[name] for r in group)
        errors = [r[f"{name}_error"] for r in group if r[name] is not None]
        known = errors and None not in errors
        row[f"{name}_error"] = math.sqrt(sum(e * e for e in errors)) / len(errors) if known else None
    for name in (*SIZES, "prefill_seconds", "tokens_per_second"):
        row[name], _ = mean_error(r[name] for r in group)
    return row


def write_csv(rows: Iterable[Row], path: Path) -> Path:
    """Writes all fields, what was not measured as an empty cell; returns the path."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, FIELDS)
    writer.writeheader()
    writer.writerows(rows)
    return safe_write.write(Path(path), text.getvalue())


MOST_COLUMNS, WITH_ERRORS = 7, 3  # so that the table fits 100 columns


def table(rows: Sequence[Row]) -> Table:
    """For a terminal of 112 columns: methods x tasks at the main length; many tasks by family."""
    length = main_length(rows)
    chosen = at_length(rows, length)
    single = len(ordered(chosen, "task")) <= MOST_COLUMNS
    chosen = chosen if single else by_family(chosen)
    tasks = ordered(chosen, "task")
    shown, left = tasks[:MOST_COLUMNS], tasks[MOST_COLUMNS:]
    t = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    t.title = f"{length:,}-token contexts" if length else None
    t.add_column("method", min_width=20, max_width=29, overflow="fold")
    for name in (*shown, "device", "of full", "host", "tok/s"):
        t.add_column(name.replace(".", ".\n"), justify="right", overflow="fold", min_width=5)
    for method in ordered(chosen, "method"):
        own = {r["task"]: r for r in chosen if r["method"] == method}
        cells = [_cell(own.get(task), len(shown) <= WITH_ERRORS) for task in shown]
        t.add_row(method, *cells, *_costs(list(own.values())))
    t.caption = _caption(chosen, single, left)
    return t


def _caption(rows: Sequence[Row], single: bool, left: Sequence[str]) -> str:
    parts = ["percent right, or bits per byte (b)"] if any(r["bits"] is not None for r in rows) else ["percent right"]
    parts += [] if single else ["tasks averaged by family"]
    parts += [f"{len(left)} more in the CSV file"] if left else []
    dtypes = " and ".join(ordered((r for r in rows if r["dtype"]), "dtype"))
    held = f"device, host: KiB held of a context{f', {dtypes}' if dtypes else ''}"
    return "; ".join([*parts, held, "of full: percent of the exact cache's bytes, both in bfloat16"])


def _cell(row: Row | None, errors: bool) -> str:
    if row is None or (row["score"] is None and row["bits"] is None):
        return "-"
    name, form = ("score", lambda x: f"{100 * x:.1f}") if row["score"] is not None else ("bits", lambda x: f"{x:.3f}")
    error = row[f"{name}_error"]
    return form(row[name]) + ("b" if name == "bits" else "") + (f" ±{form(error)}" if errors and error else "")


def costs(rows: Sequence[Row]) -> dict[str, float | None]:
    """One method's KiB per context, prefill seconds and tokens/s: means over its tasks."""
    names = ("device_percent", "device_kib", "host_kib", "prefill_seconds", "tokens_per_second")
    return {name: mean_error(r[name] for r in rows)[0] for name in names}


def _costs(rows: Sequence[Row]) -> list[str]:
    found = costs(rows)

    def cell(name: str, form: str = ",.0f") -> str:
        return "-" if found[name] is None else format(found[name], form)

    return [cell("device_kib"), cell("device_percent", ".1f"), cell("host_kib"), cell("tokens_per_second")]
