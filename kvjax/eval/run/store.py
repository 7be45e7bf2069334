"""A run on disk: records as JSON lines that survive being killed, and what the run was.

DIR/records.jsonl    one line per method and case, whole batches at a time
DIR/run.json         model, digest, weights, dtype, seed, batch, methods, tasks, lengths, machine, versions
DIR/.lock            held while a process writes; the system frees it when that process ends, however it ends
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax

from kvjax.errors import KvjaxError
from kvjax.eval.run.machine import machine, version
from kvjax.models import checkpoint
from kvjax.models.model import Model, find_checkpoint
from kvjax.utils import json_documents
from kvjax.utils.files import replace_atomically
from kvjax.utils.lock import claim

RECORDS, RUN, LOCK = "records.jsonl", "run.json", ".lock"
PINNED = ("digest", "dtype", "seed", "batch", "seen", "device")  # a run is continued only under the same ones
GROWING = ("methods", "tasks", "lengths")  # a run may be continued with more of these
NEEDED = {"method": str, "task": str, "key": str, "scores": list, "bytes": dict}
"""What every record has."""

KEEP = (
    "the records beside it are still good: if they are of this model and these options, run the same `kvjax eval` with "
    "--rebuild, which writes it anew"
)

Key = tuple[str, str, str]
"""(method, task, key of the case)"""


class Damaged(KvjaxError):
    """A run.json that says nothing usable."""


def key(record: Mapping[str, Any]) -> Key:
    """What a record is of."""
    return record["method"], record["task"], record["key"]


class Store:
    """The records of one run, held by one process; `opened` makes it."""

    def __init__(self, file: BinaryIO, records: Iterable[dict[str, Any]], before: Callable[[], None]):
        self._file, self._before = file, before  # `before` the first line is written
        self._records = {key(r): r for r in records}

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records so far."""
        return list(self._records.values())

    def find(self, method: str, task: str, case: str) -> dict[str, Any] | None:
        """The record of a method and a case, if there is one."""
        return self._records.get((method, task, case))

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Writes a batch at once and waits until it is on disk; what is there already is left as it is.

        Raises KvjaxError, and writes nothing, for what could not be read again, such as a score beyond 1.
        """
        new, lines = [dict(r) for r in records if key(r) not in self._records], ""
        for r in new:
            wrong = _problem(r)
            try:
                lines += json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n"
            except (TypeError, ValueError) as e:
                wrong = f"cannot be written as JSON ({e})"
            if wrong:
                raise KvjaxError(f"the record of {r['method']} on {r['key']} {wrong}; mend the task or its metric")
        self._before()
        self._before = lambda: None
        self._file.write(lines.encode(errors="backslashreplace"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._records |= {key(r): r for r in new}


@contextlib.contextmanager
def opened(directory: str | Path, run: Mapping[str, Any], rebuild: bool = False) -> Iterator[Store]:
    """The store of a new run, or of one to be continued; a torn last line, left by a killed process, is dropped.

    run: what `describe` gives; run.json is written before the first record is. rebuild: records stay whose run.json is
    damaged or missing, and it is written anew; without, that raises KvjaxError. So does another process that writes
    there, a line that is damaged, and another run than the one that is there.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("ab") as lock:
        claim(lock.fileno(), directory)
        records, good = _parse(directory / RECORDS)
        run = _checked(directory, run, records, rebuild)
        with (directory / RECORDS).open("ab") as file:
            file.truncate(good)
            yield Store(file, records, lambda: _write(directory / RUN, run))


def read(directory: str | Path) -> list[dict[str, Any]]:
    """The records of a run, also of one that is still going on; raises KvjaxError if there is none."""
    path = Path(directory) / RECORDS
    if not path.is_file():
        raise KvjaxError(f"{directory} has no {RECORDS}; make it: kvjax eval --out {directory}")
    return _parse(path)[0]


def read_run(directory: str | Path) -> dict[str, Any]:
    """What run.json says; raises KvjaxError if it is missing or damaged."""
    path = Path(directory) / RUN
    try:
        run = json_documents.loads(path.read_bytes())
        if not isinstance(run, dict) or "model" not in run:
            raise ValueError("it names no model")
    except FileNotFoundError:
        raise KvjaxError(f"{directory} has no {RUN}; make it: kvjax eval --out {directory}") from None
    except ValueError as e:
        raise Damaged(f"{path} is damaged ({e}); {KEEP}") from e
    return run


def _parse(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(records, bytes up to the end of the last whole line)."""
    data = path.read_bytes() if path.is_file() else b""
    good, records = data.rfind(b"\n") + 1, []
    for number, line in enumerate(data[:good].splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json_documents.loads(line)
            wrong = _problem(record)
        except ValueError as e:
            wrong = f"is no JSON ({e})"
        if wrong:
            raise KvjaxError(f"line {number} of {path} {wrong}; delete that line, and `kvjax eval` does its case again")
        records.append(record)
    return records, good


def _problem(record: Any) -> str:
    """What is wrong with a record, in words that follow its name; empty where nothing is."""
    if not isinstance(record, Mapping):
        return f"is {type(record).__name__}, not a record"
    for name, kind in NEEDED.items():
        if not isinstance(record.get(name), kind):
            has = f"has {record[name]!r:.60} as" if name in record else "has no"
            return f"{has} {name!r}, which must be a {kind.__name__}"
    if not all(isinstance(x, int | float) and 0 <= x <= 1 for x in record["scores"]):
        return f"has {record['scores']!r:.60} as 'scores', which must be numbers from 0 to 1"
    return ""


def _checked(
    directory: Path, run: Mapping[str, Any], records: Sequence[Mapping[str, Any]], rebuild: bool
) -> Mapping[str, Any]:
    """What run.json shall say, after a check against what it says."""
    try:
        if (directory / RUN).is_file():
            return _continued(read_run(directory), run, directory)
        if records:
            raise Damaged(f"{directory} has records but no {RUN}; {KEEP}")
    except Damaged:
        if not rebuild:
            raise
    if not records:
        return run
    note = (
        f"{RUN} was damaged or missing at {run['started']} and has been written anew; that the {len(records)} records "
        f"of before were made under the same {', '.join(PINNED)} has not been checked"
    )
    told = {
        "methods": [r["method"] for r in records],
        "tasks": [r["task"] for r in records if r["task"] != "speed"],
        "lengths": [n for r in records if (n := r.get("about", {}).get("length")) is not None],
    }
    run = {**run, **_grown(told, run), "rebuilt": note}
    _write(directory / RUN, run)
    return run


def _write(path: Path, run: Mapping[str, Any]) -> None:
    with replace_atomically(path) as file:
        file.write(json.dumps(run, indent=1).encode() + b"\n")


def _continued(old: Mapping[str, Any], new: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    pinned = PINNED if new["digest"] else ("model", *PINNED)
    pinned += ("weights",) if "weights" in old else ()  # runs of kvjax 0.1 do not tell
    changed = [f"{p} was {old.get(p)!r} and is now {new[p]!r}" for p in pinned if old.get(p) != new[p]]
    if changed:
        raise KvjaxError(
            f"{directory} holds another run: {'; '.join(changed)}. Choose another --out, or delete {directory}"
        )
    again = {"at": new["started"], "kvjax": new["kvjax"], "machine": new["machine"]}
    return {**old, **_grown(old, new), "resumed": [*old.get("resumed", ()), again]}


def _grown(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {n: list(dict.fromkeys([*old.get(n, ()), *new[n]])) for n in GROWING}


def describe(
    model: Model,
    *,
    seed: int,
    batch: int,
    seen: bool,
    methods: Sequence[str],
    tasks: Sequence[str],
    lengths: Sequence[int],
) -> dict[str, Any]:
    """What run.json says of a run of this model, on this machine, now."""
    return {
        "model": model.name,
        "digest": digest(model.name),
        "weights": model.fingerprint,
        "dtype": model.dtype.name,
        "seed": seed,
        "batch": batch,
        "seen": seen,
        "device": jax.devices()[0].device_kind,
        "methods": list(methods),
        "tasks": list(tasks),
        "lengths": list(lengths),
        "machine": machine(),
        "kvjax": version("kvjax"),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def digest(name: str) -> str | None:
    """SHA-256 over a checkpoint's configuration and the digests of its parts; None for a model from no checkpoint."""
    where = find_checkpoint(name)
    if not (where / checkpoint.MANIFEST).is_file():
        return None
    record = checkpoint.read_manifest(where)
    return hashlib.sha256(json.dumps([record.config.to_json(), record.digests], sort_keys=True).encode()).hexdigest()
