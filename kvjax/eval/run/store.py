"""A run on disk: records as JSON lines that survive being killed, and what the run was.

DIR/records.jsonl    one line per method and case, whole batches at a time
DIR/run.json         model, digest, dtype, seed, batch, methods, tasks, lengths, machine, versions
DIR/.lock            held while a process writes; the system frees it when that process ends, however it ends
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax

from kvjax.core.types import KvjaxError
from kvjax.eval.run.machine import machine, version
from kvjax.models import checkpoint
from kvjax.models.model import Model, located

RECORDS, RUN, LOCK = "records.jsonl", "run.json", ".lock"
PINNED = ("digest", "dtype", "seed", "batch", "seen", "device")  # a run is continued only under the same ones
GROWING = ("methods", "tasks", "lengths")  # a run may be continued with more of these

NEEDED = ("method", "task", "key")  # strings that every record has
Key = tuple[str, str, str]
"""(method, task, key of the case)"""


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
        """Writes a batch at once and waits until it is on disk; what is there already is left as it is."""
        new = [dict(r) for r in records if key(r) not in self._records]
        self._before()
        self._before = lambda: None
        lines = "".join(json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in new)
        self._file.write(lines.encode(errors="backslashreplace"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._records |= {key(r): r for r in new}


@contextlib.contextmanager
def opened(directory: str | Path, run: Mapping[str, Any]) -> Iterator[Store]:
    """The store of a new run, or of one to be continued; a torn last line, left by a killed process, is dropped.

    run: what `describe` gives; run.json is written before the first record is. Raises KvjaxError when another process
    writes there, when a line is damaged, and when the run that is there was another one.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KvjaxError(
                f"another process evaluates into {directory}; wait for it, or choose another --out"
            ) from None
        run = _checked(directory, run)
        path = directory / RECORDS
        records, good = _parse(path)
        with path.open("ab") as file:
            if file.tell() != good:
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
        run = json.loads(path.read_text())
        if isinstance(run, dict):
            return run
        raise ValueError(f"a {type(run).__name__}, not an object")
    except FileNotFoundError:
        raise KvjaxError(f"{directory} has no {RUN}; make it: kvjax eval --out {directory}") from None
    except ValueError as e:
        raise KvjaxError(f"{path} is damaged ({e}); delete {directory}, or choose another --out") from e


def _parse(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(records, bytes up to the end of the last whole line)."""
    if not path.is_file():
        return [], 0
    data = path.read_bytes()
    good = data.rfind(b"\n") + 1
    return [
        _record(line, number, path) for number, line in enumerate(data[:good].splitlines(), 1) if line.strip()
    ], good


def _record(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as e:
        wrong = f"is no JSON ({e})"
    else:
        if not isinstance(record, dict):
            wrong = f"is {type(record).__name__}, not a record"
        elif lacking := [name for name in NEEDED if not isinstance(record.get(name), str)]:
            wrong = f"has no {lacking[0]!r} (a string)"
        else:
            return record
    raise KvjaxError(f"line {number} of {path} {wrong}; delete that line, and `kvjax eval` does its case again")


def _checked(directory: Path, run: Mapping[str, Any]) -> Mapping[str, Any]:
    """What run.json shall say, after a check against what it says."""
    if (directory / RUN).is_file():
        return _continued(read_run(directory), run, directory)
    if (directory / RECORDS).is_file() and (directory / RECORDS).stat().st_size:
        raise KvjaxError(f"{directory} has records but no {RUN}; delete {directory}, or choose another --out")
    return run


def _write(path: Path, run: Mapping[str, Any]) -> None:
    fresh = path.with_suffix(".partial")
    with fresh.open("w") as file:
        file.write(json.dumps(run, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _continued(old: Mapping[str, Any], new: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    pinned = PINNED if new["digest"] else ("model", *PINNED)
    changed = [f"{p} was {old.get(p)!r} and is now {new[p]!r}" for p in pinned if old.get(p) != new[p]]
    if changed:
        raise KvjaxError(
            f"{directory} holds another run: {'; '.join(changed)}. Choose another --out, or delete {directory}"
        )
    grown = {n: list(dict.fromkeys([*old[n], *new[n]])) for n in GROWING}
    again = {"at": new["started"], "kvjax": new["kvjax"], "machine": new["machine"]}
    return {**old, **grown, "resumed": [*old.get("resumed", ()), again]}


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
    where = located(name)
    if not (where / checkpoint.MANIFEST).is_file():
        return None
    record = checkpoint.manifest(where)
    return hashlib.sha256(json.dumps([record.config.to_json(), record.digests], sort_keys=True).encode()).hexdigest()
