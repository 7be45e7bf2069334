"""A run: every method on every case, in batches that depend on the cases alone, recorded as it goes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.progress import Progress

from kvjax.cache.protocol import KVMethod
from kvjax.errors import KvjaxError
from kvjax.eval.run import harness
from kvjax.eval.run.reader import Reader
from kvjax.eval.run.store import Store
from kvjax.eval.tasks.case import Case
from kvjax.generation.memory_plan import planned_bytes
from kvjax.methods.method_hash import method_hash
from kvjax.methods.strings import Methods, is_builtin_method, resolve
from kvjax.models.model import Model

SPEED = "speed"
GROUP = 16  # methods that share what the model makes of a batch


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Cases that run together: equally many questions, or text that follows."""

    cases: tuple[Case, ...]
    rows: int  # the last batch is filled up with copies of its last case, so that all have one shape
    new: int  # the most tokens that any of the group may answer

    @property
    def filled(self) -> tuple[Case, ...]:
        """The cases, `rows` of them."""
        return self.cases + self.cases[-1:] * (self.rows - len(self.cases))


def batches(cases: Sequence[Case], size: int) -> list[Batch]:
    """Groups of equal task, length and number of questions, cut evenly into batches of at most `size`.

    Inside a group contexts are sorted by length. What is done already plays no part, so a run that was killed goes on
    with the same batches, and gives the same bits.
    """
    if size < 1:
        raise KvjaxError(f"batch must be at least 1 row, got {size}")
    groups: dict[Any, list[Case]] = {}
    for c in cases:
        what = (c.task, c.about.get("length"), len(c.asks), c.turns, c.follows is None)
        groups.setdefault(what, []).append(c)
    return [b for group in groups.values() for b in _cut(sorted(group, key=lambda c: len(c.context)), size)]


def _cut(group: list[Case], size: int) -> Iterator[Batch]:
    count = -(-len(group) // size)
    rows = -(-len(group) // count)
    new = max((a.new_tokens for c in group for a in c.asks), default=0)
    for start in range(0, len(group), rows):
        yield Batch(tuple(group[start : start + rows]), rows, new)


def evaluate(
    model: Model,
    methods: Methods,
    cases: Sequence[Case],
    store: Store,
    *,
    batch: int = 8,
    seen: bool = False,
    speed: Sequence[int] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Appends to the store one record per method and case that it lacks, a batch at a time; greedy, deterministic.

    methods: values, strings, or strings separated by ";"; a string is recorded as it is, and a value under the string
    that makes it (`kvjax.name_of`). seen: each question ends the prompt (`harness.seen`); cases with `turns`
    are conversations in any case. speed: context lengths, tokens, at which speed is measured, `batch` at a time. Raises
    KvjaxError before anything runs for a method or case that cannot run, and when a batch fails; what was done stays.
    """
    parsed = resolve(methods)
    for name, method in parsed.items():
        check_runs(model, name, method, [len(c.context) for c in cases] + list(speed))
    marks, hashes = check_cases(cases, store), check_unchanged(parsed, store)
    units, names = batches(cases, batch), list(parsed)
    together = [names[start : start + GROUP] for start in range(0, len(names), GROUP)]
    work = [(u, m) for group in together for u in (*units, *speed) for m in group if not _done(store, m, u)]
    reader = Reader(model)
    with Progress(disable=True) if progress is None else progress as bar:
        total = bar.add_task("all", total=sum(_size(u) for u, _ in work))
        for (name, task), part in itertools.groupby(work, key=lambda w: (w[1], _task(w[0]))):
            todo = [u for u, _ in part]
            line = bar.add_task(f"{name}: {task}", total=sum(map(_size, todo)))
            for unit in todo:
                found = _guarded(reader, name, parsed[name], unit, seen, batch, seed, marks)
                store.append([record | {"method_hash": hashes[name]} for record in found])
                bar.advance(line, _size(unit))
                bar.advance(total, _size(unit))
            bar.remove_task(line)


def _done(store: Store, method: str, unit: Batch | int) -> bool:
    if isinstance(unit, int):
        return store.find(method, SPEED, f"{SPEED}/{unit}") is not None
    return all(store.find(method, c.task, c.key) for c in unit.cases)


def _size(unit: Batch | int) -> int:
    return 1 if isinstance(unit, int) else len(unit.cases)


def _task(unit: Batch | int) -> str:
    return SPEED if isinstance(unit, int) else unit.cases[0].task


def check_runs(model: Model, name: str, method: KVMethod, lengths: Sequence[int]) -> None:
    """Raises KvjaxError, naming the method, if it cannot run on this model with contexts of such lengths."""
    try:
        for n in {min(lengths, default=1), max(lengths, default=1)}:
            planned_bytes(method, model.config, n, dtype=model.dtype)
    except KvjaxError as e:
        raise KvjaxError(f"method {name!r} cannot run on {model.name or 'this model'}: {e}") from e


def check_unchanged(methods: Mapping[str, KVMethod], store: Store) -> dict[str, str]:
    """The hash of each method; raises KvjaxError where the store has records of another method of that name."""
    hashes = {name: method_hash(method) for name, method in methods.items()}
    for r in store.records:
        recorded = r.get("method_hash") or r.get("meant")  # the field's name in kvjax 0.1
        if recorded and recorded != hashes.get(r["method"], recorded):
            raise KvjaxError(
                f"{r['method']!r} is not the method that was recorded under this name: its code, its values, its "
                "table or the version of kvjax have changed. Choose another --out, or delete the old one"
            )
    return hashes


def check_cases(cases: Sequence[Case], store: Store) -> dict[tuple[str, str], str]:
    """The fingerprint of each case by task and key, compared with what the store says of it."""
    from kvjax.eval.tasks.metrics import METRICS

    marks = {(c.task, c.key): fingerprint(c) for c in cases}
    for c in cases:
        if (c.follows is None) == (not c.asks):
            raise KvjaxError(f"case {c.key!r} needs either questions or a text that follows, and not both")
        if c.follows is not None and not (c.bytes and len(c.follows)):
            raise KvjaxError(f"case {c.key!r} has {len(c.follows)} tokens and {c.bytes} bytes to follow; give some")
        for a in c.asks:
            if a.metric not in METRICS:
                raise KvjaxError(f"case {c.key!r} asks for metric {a.metric!r}; there are {', '.join(METRICS)}")
            if not (len(a.prompt) and a.new_tokens > 0 and a.references):
                raise KvjaxError(f"case {c.key!r} has a question without prompt, tokens to answer, or reference")
    for a in {a.metric: a for c in cases for a in c.asks}.values():
        METRICS[a.metric]("", a)  # now, and not after an hour, it says which library is missing
    for r in store.records:
        mark = marks.get((r["task"], r["key"]))
        if mark not in (None, r.get("case")):
            raise KvjaxError(
                f"case {r['key']!r} is not the one that was recorded under this key: it was made with other questions, "
                "depths, text, data or version of kvjax. Choose another --out, or delete the old one"
            )
    return marks


def fingerprint(case: Case) -> str:
    """A digest of all that a case asks and expects."""
    arrays = [case.context, *(a.prompt for a in case.asks), *([] if case.follows is None else [case.follows])]
    total = hashlib.sha256()
    for x in arrays:
        total.update(f"{len(x)} ".encode() + np.asarray(x, np.int32).tobytes())
    rest = [[a.metric, a.references, a.new_tokens, a.stop, a.options] for a in case.asks]
    total.update(json.dumps([rest, case.turns, case.bytes]).encode())
    return total.hexdigest()[:16]


def _guarded(
    reader: Reader,
    name: str,
    method: KVMethod,
    unit: Batch | int,
    seen: bool,
    batch: int,
    seed: int,
    marks: Mapping[tuple[str, str], str],
) -> list[dict[str, Any]]:
    """The records of a unit of work; whatever goes wrong becomes one line that says what to do."""
    try:
        if isinstance(unit, int):
            return [speed_record(reader.model, name, method, unit, batch, seed)]
        return records(reader, name, method, unit, seen, marks)
    except KvjaxError as e:
        raise KvjaxError(f"{name} on {_task(unit)}: {e}") from e
    except Exception as e:
        first = (str(e).splitlines() or [""])[0][:300]
        full = isinstance(e, MemoryError) or "RESOURCE_EXHAUSTED" in str(e)
        remedy = "use a smaller --batch with another --out" if full else "leave this method or task out"
        raise KvjaxError(
            f"{name} on {_task(unit)} failed ({type(e).__name__}: {first}). What was done before is kept; {remedy}"
        ) from e


def records(
    reader: Reader, name: str, method: KVMethod, batch: Batch, seen: bool, marks: Mapping[tuple[str, str], str]
) -> list[dict[str, Any]]:
    """Runs a batch: one record per case."""
    rows = batch.filled
    if rows[0].follows is not None:
        bits, likeliest, size = harness.following(reader, method, rows)
        found = [
            {"scores": [], "bits": float(b.sum() / c.bytes), "likeliest": best.tolist()}
            for c, b, best in zip(batch.cases, bits, likeliest, strict=False)
        ]
    else:
        protocol = harness.conversation if rows[0].turns else harness.seen if seen else harness.shared
        replies, size = protocol(reader, method, rows, batch.new)
        found = [_scored(c, said) for c, said in zip(batch.cases, zip(*replies, strict=True), strict=False)]
    each, longest = size.per_sequence(batch.rows), max(len(c.context) for c in batch.cases)
    fraction = harness.bfloat16_fractions(method, reader.model.config, longest)
    # A report may be made where a method of one's own is not known, and then only the record can tell its traits.
    traits = {} if is_builtin_method(name) else {"traits": dataclasses.asdict(method.traits)}
    return [
        {
            "method": name,
            "task": c.task,
            "key": c.key,
            "case": marks[c.task, c.key],
            "about": dict(c.about),
            "tokens": len(c.context),
            "turns": c.turns,
            **f,
            "bytes": each.held,
            "room": each.reserved,
            "dtype": each.dtype,
            "bfloat16_fraction": fraction,
            **traits,
        }
        for c, f in zip(batch.cases, found, strict=True)
    ]


def _scored(case: Case, predictions: Sequence[str]) -> dict[str, Any]:
    from kvjax.eval.tasks.metrics import METRICS

    return {
        "metric": ", ".join(dict.fromkeys(a.metric for a in case.asks)),
        "scores": [float(METRICS[a.metric](p, a)) for p, a in zip(predictions, case.asks, strict=True)],
        "asks": [{"turn": i, **a.about} for i, a in enumerate(case.asks)],
        "predictions": list(predictions),
    }


def speed_record(model: Model, name: str, method: KVMethod, length: int, batch: int, seed: int) -> dict[str, Any]:
    """Measures speed at one length."""
    prefill, decode, size = harness.speed(model, method, length, batch, seed)
    return {
        "method": name,
        "task": SPEED,
        "key": f"{SPEED}/{length}",
        "case": "",
        "about": {"length": length, "batch": batch},
        "tokens": length,
        "scores": [],
        "prefill_seconds": prefill,
        "tokens_per_second": decode,
        "bytes": size.per_sequence(batch).held,
        "dtype": size.dtype,
        "bfloat16_fraction": harness.bfloat16_fractions(method, model.config, length),
    }
