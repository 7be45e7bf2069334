"""A run as a table: one row per method, task and length, from the records of its cases."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from kvjax.eval.page.intervals import Interval, average_interval, mean_interval, score_interval
from kvjax.utils import display
from kvjax.utils.files import write_text

Record = Mapping[str, Any]
Row = dict[str, Any]

REFERENCE = "full"  # the method that `agreement` compares with
SPEED = "speed"  # the task whose records hold times and no answers


@dataclasses.dataclass(frozen=True)
class EvalRow:
    """One method on one task at one length; None where something was not measured.

    A field is an attribute, and also an item as in the CSV file: `row.bits` is `row["bits"]`. `_low` and `_high` are
    the ends of 95% intervals over contexts (`kvjax.eval.page.intervals`), `_error` standard errors, which are 0 where
    all contexts agree, and do not say then how sure a value is.
    """

    method: str
    task: str
    length: int | None  # tokens of a context
    metric: str | None
    turns: bool  # whether the questions are a conversation
    contexts: int
    questions: int
    score: float | None  # 0 to 1
    score_error: float | None
    score_low: float | None
    score_high: float | None
    first: float | None  # score of each context's first question, where there are several
    first_error: float | None
    first_low: float | None
    first_high: float | None
    later: float | None  # score of the other questions
    later_error: float | None
    later_low: float | None
    later_high: float | None
    bits: float | None  # per byte of text, for perplexity
    bits_error: float | None
    bits_low: float | None
    bits_high: float | None
    bits_above_full: float | None  # mean difference to `full` over the contexts that both have
    bits_above_full_low: float | None
    bits_above_full_high: float | None
    agreement: float | None  # fraction of tokens whose likeliest token is that of `full`
    agreement_error: float | None
    agreement_low: float | None
    agreement_high: float | None
    device_percent: float | None  # bytes held, of those of the exact cache, both in bfloat16
    host_percent: float | None
    device_kib: float | None  # bytes held per context, in `dtype`
    host_kib: float | None
    room_kib: float | None  # reserved for tokens to come, in both memories
    dtype: str | None
    prefill_seconds: float | None
    tokens_per_second: float | None
    device_bfloat16_kib: float | None  # bytes of a context in bfloat16, as planned: those of `device_percent`
    host_bfloat16_kib: float | None

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]


FIELDS = tuple(field.name for field in dataclasses.fields(EvalRow))
SIZES = (
    *("device_percent", "host_percent", "device_kib", "host_kib", "room_kib"),
    *("device_bfloat16_kib", "host_bfloat16_kib"),
)


def rows(records: Iterable[Record]) -> list[Row]:
    """Returns one row per (method, task, length), methods and tasks as they first appear, lengths ascending.

    The keys of a row are FIELDS; a value that was not measured is None.
      score, first, later: 0 to 1, means over the cases of each case's mean; first and later are the first question of
        each context and the others, where there are several.
      *_low, *_high: 95% intervals over cases; *_error: standard errors over cases.
      bits_above_full: bits less those of the method "full", case by case.
      agreement: fraction of equal `likeliest` tokens with the method "full".
      *_bfloat16_kib: bytes of a context in bfloat16, in which methods are compared, as planned; None in records of
        versions that did not write them.
      *_percent: the same, as percent of the exact cache's in bfloat16.
      device_kib, host_kib: measured, per context, in `dtype`, of the tokens in the cache; room_kib: of both memories,
        for the tokens that follow.
    """
    records = latest(records)
    speeds = _group((r for r in records if r["task"] == SPEED), lambda r: (r["method"], length_of(r)))
    exact = {(r["task"], r["key"]): r for r in records if r["method"] == REFERENCE}
    methods, tasks = distinct_values(records, "method"), distinct_values(records, "task")
    cases = _group(records, lambda r: (r["method"], r["task"], length_of(r)))
    ordered = sorted(cases, key=lambda key: (methods.index(key[0]), tasks.index(key[1]), key[2] or 0))
    return [_summarize_cases(key, cases[key], exact, speeds.get((key[0], key[2]), [])) for key in ordered]


def latest(records: Iterable[Record]) -> list[Record]:
    """Drops repetitions: the last record of a method and case counts."""
    return list({(r["method"], r["task"], r["key"]): r for r in records}.values())


def distinct_values(items: Iterable[Record], field: str) -> list[Any]:
    """Returns the values of a field in the order of their first appearance."""
    return list(dict.fromkeys(r[field] for r in items))


def length_of(record: Record) -> int | None:
    """Returns the length that the run asked for, in tokens; None where the data decide."""
    return record.get("about", {}).get("length")


def first_later(record: Record) -> tuple[float, float] | None:
    """Returns the mean score of a context's first question and of the later ones; None without later ones."""
    first, later = [], []
    asks = record.get("asks") or [{}] * len(record["scores"])
    for i, (ask, score) in enumerate(zip(asks, record["scores"], strict=True)):
        (later if ask.get("turn", i) else first).append(score)
    return (float(np.mean(first)), float(np.mean(later))) if first and later else None


def mean_error(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Returns the mean of all values but None, and its standard error; the error of a single value is None."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return None, None
    error = float(np.std(known, ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else None
    return float(np.mean(known)), error


def _group(records: Iterable[Record], key) -> dict[Any, list[Record]]:
    groups: dict[Any, list[Record]] = {}
    for r in records:
        groups.setdefault(key(r), []).append(r)
    return groups


def _summarize_cases(key: tuple, cases: Sequence[Record], exact: Mapping, speeds: Sequence[Record]) -> Row:
    method, task, length = key
    split = [first_later(r) for r in cases]
    agreement, above = [], []
    for r in cases:
        reference = exact.get((task, r["key"]), {})
        tokens, exact_tokens = r.get("likeliest") or (), reference.get("likeliest") or ()
        # Whether each token is the one that the exact cache makes likeliest.
        agreement.append([a == b for a, b in zip(tokens, exact_tokens, strict=False)])
        bits = r.get("bits"), reference.get("bits")
        above.append(None if None in bits else bits[0] - bits[1])
    values = {
        "score": [float(np.mean(r["scores"])) if r["scores"] else None for r in cases],
        "first": [s[0] if s else None for s in split],
        "later": [s[1] if s else None for s in split],
        "bits": [r.get("bits") for r in cases],
        "bits_above_full": above,
        "agreement": [float(np.mean(equal)) if equal else None for equal in agreement],
    }
    row: Row = dict.fromkeys(FIELDS)
    row |= {"method": method, "task": task, "length": length, "metric": cases[0].get("metric")}
    row |= {"turns": any(r.get("turns", False) for r in cases), "contexts": len(cases)}
    row["questions"] = sum(len(r["scores"]) for r in cases)
    for name, of_cases in values.items():
        mean, error = mean_error(of_cases)
        row |= {name: mean, f"{name}_error": error} if f"{name}_error" in row else {name: mean}
        known = [x for x in of_cases if x is not None and math.isfinite(x)]
        if known:
            _set_interval(row, name, mean_interval(known) if name.startswith("bits") else score_interval(known))
    for name, kind in (("device_kib", "device"), ("host_kib", "pinned_host")):
        size, _ = mean_error(r.get("bytes", {}).get(kind) for r in cases)
        row[name] = None if size is None else size / 1024
        planned, _ = mean_error(r.get("bfloat16_bytes", {}).get(kind) for r in cases)
        row[name.replace("kib", "bfloat16_kib")] = None if planned is None else planned / 1024
        fraction, _ = mean_error(r.get("bfloat16_fraction", {}).get(kind) for r in cases)
        row[name.replace("kib", "percent")] = None if fraction is None else round(100 * fraction, 3)
    row["dtype"] = next((r["dtype"] for r in cases if "dtype" in r), None)
    room, _ = mean_error(sum(r["room"].values()) for r in cases if "room" in r)
    row["room_kib"] = None if room is None else room / 1024
    for name in ("prefill_seconds", "tokens_per_second"):
        row[name], _ = mean_error(r.get(name) for r in speeds)
    return row


def interval_of(row: Record, measure: str) -> Interval | None:
    """Returns the 95% interval of a row's measure, or None."""
    low, high = row[f"{measure}_low"], row[f"{measure}_high"]
    return None if low is None or high is None else Interval(low, high)


def _set_interval(row: Row, measure: str, interval: Interval | None) -> None:
    row[f"{measure}_low"], row[f"{measure}_high"] = (None, None) if interval is None else interval


def lengths(rows: Iterable[Row]) -> list[int]:
    """Returns all lengths, ascending."""
    return sorted({r["length"] for r in rows if r["length"] is not None})


def main_length(rows: Iterable[Row]) -> int | None:
    """Returns the length at which most tasks were measured, the largest of several."""
    rows = [r for r in rows if r["task"] != SPEED]
    num_tasks = {n: len({r["task"] for r in rows if r["length"] == n}) for n in lengths(rows)}
    return max(num_tasks, key=lambda n: (num_tasks[n], n), default=None)


def at_length(rows: Iterable[Row], length: int | None) -> list[Row]:
    """Returns the rows of one length and the rows without a length, but none of speed."""
    return [r for r in rows if r["task"] != SPEED and r["length"] in (length, None)]


def by_family(rows: Iterable[Row]) -> list[Row]:
    """Averages the tasks of a family ("ruler" for "ruler.vt") for rows of one length; `task` names the family.

    Intervals and errors are those of a mean over fixed tasks. A method that lacks a task of a family has no row for it.
    """
    rows = [r for r in rows if r["task"] != SPEED]
    tasks: dict[str, set[str]] = {}
    for r in rows:
        tasks.setdefault(r["task"].partition(".")[0], set()).add(r["task"])
    groups = _group(rows, lambda r: (r["method"], r["task"].partition(".")[0]))
    merged = []
    for (method, family), group in groups.items():
        if len(group) < len(tasks[family]):
            continue
        row = dict(group[0]) | {"method": method, "task": family}
        row |= {name: sum(r[name] for r in group) for name in ("contexts", "questions")}
        row["turns"] = any(r["turns"] for r in group)
        for name in ("score", "first", "later", "bits", "bits_above_full", "agreement"):
            row[name], _ = mean_error(r[name] for r in group)
            known = [r for r in group if r[name] is not None]
            if known:
                means, own = [r[name] for r in known], [interval_of(r, name) for r in known]
                _set_interval(row, name, average_interval(means, own))
            if f"{name}_error" in row:
                errors = [r[f"{name}_error"] for r in known]
                has_errors = errors and None not in errors
                row[f"{name}_error"] = math.sqrt(sum(e * e for e in errors)) / len(errors) if has_errors else None
        for name in (*SIZES, "prefill_seconds", "tokens_per_second"):
            row[name], _ = mean_error(r[name] for r in group)
        merged.append(row)
    return merged


def write_csv(rows: Iterable[Row], path: Path) -> Path:
    """Writes all fields, with an empty cell for None; returns the path."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, FIELDS)
    writer.writeheader()
    writer.writerows(rows)
    return write_text(Path(path), text.getvalue())


MOST_TASK_COLUMNS, MOST_COLUMNS_WITH_INTERVALS = 7, 3  # so that the table fits 100 columns of a terminal


def table(rows: Sequence[Row]) -> Table:
    """Makes the table for a terminal of 112 columns: methods x tasks at the main length; many tasks by family."""
    # A terminal has room for one length; the page and the CSV file have all.
    length = main_length(rows)
    chosen = at_length(rows, length)
    is_by_family = len(distinct_values(chosen, "task")) > MOST_TASK_COLUMNS
    chosen = by_family(chosen) if is_by_family else chosen
    tasks = distinct_values(chosen, "task")
    shown, left = tasks[:MOST_TASK_COLUMNS], tasks[MOST_TASK_COLUMNS:]
    t = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    t.title = f"{length:,}-token contexts" if length else None
    t.add_column("method", min_width=20, max_width=29, overflow="fold")
    for name in (*shown, "device", "of full", "host", "tok/s"):
        t.add_column(name.replace(".", ".\n"), justify="right", overflow="fold", min_width=5)
    cost_formats = {"device_bfloat16_kib": ",.0f", "device_percent": ".1f", "host_bfloat16_kib": ",.0f"}
    cost_formats["tokens_per_second"] = ",.0f"
    for method in distinct_values(chosen, "method"):
        own = {r["task"]: r for r in chosen if r["method"] == method}
        cells = [_format_quality(own.get(task), len(shown) <= MOST_COLUMNS_WITH_INTERVALS) for task in shown]
        cost = costs(list(own.values()))
        cells += ["-" if cost[name] is None else format(cost[name], form) for name, form in cost_formats.items()]
        t.add_row(method, *cells)
    # Only what stands in the table is explained: a single text has no interval, and scores stand in brackets.
    cells = [str(cell) for column in t.columns[1 : 1 + len(shown)] for cell in column.cells]
    units = {"percent right": "score", "bits per byte (b)": "bits"}
    caption = [", or ".join(unit for unit, name in units.items() if any(r[name] is not None for r in chosen))]
    marks = [mark for mark, sign in (("(..)", "("), ("±", "±")) if any(sign in cell for cell in cells)]
    caption += [f"{' and '.join(marks)}: 95% intervals over contexts"] if marks else []
    caption += ["+ and - from full on the same texts"] if any("b +" in x or "b -" in x for x in cells) else []
    caption += ["tasks averaged by family"] if is_by_family else []
    caption += [f"{len(left)} more in the CSV file"] if left else []
    caption += ["device, host: KiB of a context, of full: percent of the exact cache's bytes, all in bfloat16"]
    dtypes = " and ".join(distinct_values((r for r in chosen if r["dtype"]), "dtype"))
    t.caption = "; ".join([*filter(None, caption), *([f"computed in {dtypes}"] if dtypes else [])])
    return t


def format_value(value: float, measure: str) -> str:
    """Formats a value of a measure: bits per byte as they are, any other in percent."""
    return f"{value:.3f}" if measure.startswith("bits") else f"{100 * value:.1f}"


def format_interval(row: Row, measure: str) -> str:
    """Formats the 95% interval of a row's measure: "(75–99)" percent, "±0.012" bits per byte; "" if there is none."""
    interval = interval_of(row, measure)
    if interval is None:
        return ""
    if measure.startswith("bits"):  # whose intervals have the mean in their middle
        return f"±{(interval.high - interval.low) / 2:.3f}"
    return f"({100 * interval.low:.0f}–{100 * interval.high:.0f})"


def format_uncertainty(row: Row, measure: str) -> str:
    """Formats what a value leaves open: its interval; of bits per byte the difference to `full` where that is known."""
    if measure != "bits" or row["bits_above_full"] is None:
        return format_interval(row, measure)
    # Texts differ far more than methods do on one text, so that only the difference tells methods apart.
    difference = f"{row['bits_above_full']:+.3f} {format_interval(row, 'bits_above_full')}".rstrip()
    return "" if row["method"] == REFERENCE else difference


def _format_quality(row: Row | None, has_interval: bool) -> str:
    measure = next((m for m in ("score", "bits") if row is not None and row[m] is not None), None)
    if row is None or measure is None:
        return "-"
    text = format_value(row[measure], measure) + ("b" if measure == "bits" else "")
    return f"{text} {format_uncertainty(row, measure)}".rstrip() if has_interval else text


def describe_row(row: Row) -> str:
    """Says a row in one line, as a run shows it before its table is there."""
    at = "" if row["length"] is None else f" at {row['length']:,} tokens"
    if row["task"] == SPEED:
        return f"{row['method']}{at}: {row['tokens_per_second']:,.0f} tokens/s"
    unit = "" if row["score"] is None else " percent right"
    contexts = display.count(row["contexts"], "context")
    return f"{row['method']}{at}: {row['task']} {_format_quality(row, True)}{unit}, {contexts}"


def costs(rows: Sequence[Row]) -> dict[str, float | None]:
    """Returns one method's KiB per context in bfloat16, prefill seconds and tokens/s: means over its tasks."""
    names = ("device_percent", "device_bfloat16_kib", "host_bfloat16_kib", "prefill_seconds", "tokens_per_second")
    return {name: mean_error(r[name] for r in rows)[0] for name in names}
