"""A run on disk: records as JSON lines that survive a kill, and a description of the run.

DIR/records.jsonl    one line per method and case, whole batches at a time
DIR/run.json         the model and its digests, the options, methods, tasks and lengths, the machine and versions
DIR/.lock            locked while a process writes; the system frees it when that process ends, however it ends
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
from kvjax.models.fingerprint import KIND as FINGERPRINT_KIND
from kvjax.models.model import Model, find_checkpoint
from kvjax.utils import json_documents
from kvjax.utils.files import replace_atomically
from kvjax.utils.lock import claim

RECORDS, RUN, LOCK = "records.jsonl", "run.json", ".lock"
# A run is continued under the same ones only.
PINNED = ("digest", "weights", "dtype", "seed", "batch", "question_aware", "device")
GROWING = ("methods", "tasks", "lengths")  # a run may be continued with more of these
REQUIRED_FIELDS = {"method": str, "task": str, "key": str, "scores": list, "bytes": dict}
"""Fields of every record, with their types."""

RENAMED_FIELDS = {"seen": "question_aware", "meant": "method_hash"}
"""Names in files of earlier versions of kvjax, which are read under their new names."""

REBUILD_HINT = (
    "its records are still good: if they are of this model and these options, run the same `kvjax eval` with "
    "--rebuild, which writes it anew"
)

RecordKey = tuple[str, str, str]
"""(method, task, key of the case)"""


class DamagedRun(KvjaxError):
    """A run.json is missing, says nothing usable, or nothing of all weights."""


def record_key(record: Mapping[str, Any]) -> RecordKey:
    """Returns the method, task and case that a record is about."""
    return record["method"], record["task"], record["key"]


class Store:
    """The records of one run, owned by one process; `open_store` makes it."""

    def __init__(self, file: BinaryIO, records: Iterable[dict[str, Any]], write_run: Callable[[], None]):
        self._file, self._write_run = file, write_run
        self._records = {record_key(r): r for r in records}

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records so far."""
        return list(self._records.values())

    def find(self, method: str, task: str, case: str) -> dict[str, Any] | None:
        """Returns the record of a method and a case, if there is one."""
        return self._records.get((method, task, case))

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Writes a batch of records at once and waits until it is on disk; records that exist stay as they are.

        Raises:
          KvjaxError: a record could not be read again, such as a score beyond 1; then nothing is written.
        """
        new, lines = [dict(r) for r in records if record_key(r) not in self._records], ""
        for r in new:
            wrong = _find_problem(r)
            try:
                lines += json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n"
            except (TypeError, ValueError) as e:
                wrong = f"cannot be written as JSON ({e})"
            if wrong:
                raise KvjaxError(f"the record of {r['method']} on {r['key']} {wrong}; mend the task or its metric")
        # run.json is written with the first record: a run that fails before it leaves no description behind.
        self._write_run()
        self._write_run = lambda: None
        self._file.write(lines.encode(errors="backslashreplace"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._records |= {record_key(r): r for r in new}


@contextlib.contextmanager
def open_store(directory: str | Path, run: Mapping[str, Any], rebuild: bool = False) -> Iterator[Store]:
    """Opens the store of a new run, or of one to be continued; a torn last line, left by a kill, is dropped.

    Args:
      directory: the run's folder.
      run: the result of `describe_run`; run.json is written before the first record is.
      rebuild: whether records whose run.json is damaged or missing are kept, and run.json is written anew.

    Raises:
      KvjaxError: another process writes there, a line is damaged, run.json is damaged or missing and `rebuild` is
        False, or the folder holds another run.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("ab") as lock:
        claim(lock.fileno(), directory)
        records, num_good_bytes = _parse_records(directory / RECORDS)
        run = _merge_runs(directory, run, records, rebuild)
        with (directory / RECORDS).open("ab") as file:
            file.truncate(num_good_bytes)
            yield Store(file, records, lambda: _write_run(directory / RUN, run))


def read(directory: str | Path) -> list[dict[str, Any]]:
    """Reads the records of a run, also of one that is still going on; raises KvjaxError if there is none."""
    path = Path(directory) / RECORDS
    if not path.is_file():
        raise KvjaxError(f"{directory} has no {RECORDS}; make it: kvjax eval --out {directory}")
    return _parse_records(path)[0]


def read_run(directory: str | Path) -> dict[str, Any]:
    """Reads run.json; raises KvjaxError if it is missing or damaged."""
    path = Path(directory) / RUN
    try:
        run = json_documents.loads(path.read_bytes())
        if not isinstance(run, dict) or "model" not in run:
            raise ValueError("it names no model")
    except FileNotFoundError:
        raise KvjaxError(f"{directory} has no {RUN}; make it: kvjax eval --out {directory}") from None
    except ValueError as e:
        raise DamagedRun(f"{path} is damaged ({e}); {REBUILD_HINT}") from e
    return _rename_fields(run)


def _parse_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(records, bytes up to the end of the last whole line)."""
    data = path.read_bytes() if path.is_file() else b""
    # A line without its end was torn by a kill.
    num_good_bytes, records = data.rfind(b"\n") + 1, []
    for number, line in enumerate(data[:num_good_bytes].splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json_documents.loads(line)
            wrong = _find_problem(record)
        except ValueError as e:
            wrong = f"is no JSON ({e})"
        if wrong:
            raise KvjaxError(f"line {number} of {path} {wrong}; delete that line, and `kvjax eval` does its case again")
        records.append(_rename_fields(record))
    return records, num_good_bytes


def _rename_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    return {RENAMED_FIELDS.get(name, name): value for name, value in document.items()}


def _find_problem(record: Any) -> str:
    """Says why a record is unusable, in words that follow its name; empty if it is good."""
    if not isinstance(record, Mapping):
        return f"is {type(record).__name__}, not a record"
    for name, kind in REQUIRED_FIELDS.items():
        if not isinstance(record.get(name), kind):
            has = f"has {record[name]!r:.60} as" if name in record else "has no"
            return f"{has} {name!r}, which must be a {kind.__name__}"
    if not all(isinstance(x, int | float) and 0 <= x <= 1 for x in record["scores"]):
        return f"has {record['scores']!r:.60} as 'scores', which must be numbers from 0 to 1"
    return ""


def _merge_runs(
    directory: Path, new: Mapping[str, Any], records: Sequence[Mapping[str, Any]], rebuild: bool
) -> Mapping[str, Any]:
    """The next content of run.json, checked against its present content."""
    try:
        if (directory / RUN).is_file():
            return _continue_run(read_run(directory), new, directory)
        if records:
            raise DamagedRun(f"{directory} has records but no {RUN}; {REBUILD_HINT}")
    except DamagedRun:
        if not rebuild:
            raise
    if not records:
        return new
    note = (
        f"{RUN} was damaged, missing or old at {new['started']} and has been written anew; that the {len(records)} "
        f"records of before were made under the same {', '.join(PINNED)} has not been checked"
    )
    recorded = {
        "methods": [r["method"] for r in records],
        "tasks": [r["task"] for r in records if r["task"] != "speed"],
        "lengths": [n for r in records if (n := r.get("about", {}).get("length")) is not None],
    }
    run = {**new, **_extend_lists(recorded, new), "rebuilt": note}
    _write_run(directory / RUN, run)
    return run


def _continue_run(old: Mapping[str, Any], new: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    pinned = PINNED if new["digest"] else ("model", *PINNED)
    is_old = not str(old.get("weights", "")).startswith(FINGERPRINT_KIND)
    changed = [
        f"{p} was {old.get(p)!r} and is now {new[p]!r}"
        for p in pinned
        if old.get(p) != new[p] and not (p == "weights" and is_old)
    ]
    if changed:
        raise KvjaxError(
            f"{directory} holds another run: {'; '.join(changed)}. Choose another --out, or delete {directory}"
        )
    if is_old:
        raise DamagedRun(
            f"{directory / RUN} is of an earlier kvjax, which looked at few of a model's weights, or at none, so that "
            f"it cannot be seen whether these are the same; {REBUILD_HINT}; or choose another --out"
        )
    resumption = {"at": new["started"], "kvjax": new["kvjax"], "machine": new["machine"]}
    return {**old, **_extend_lists(old, new), "resumed": [*old.get("resumed", ()), resumption]}


def _extend_lists(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {n: list(dict.fromkeys([*old.get(n, ()), *new[n]])) for n in GROWING}


def _write_run(path: Path, run: Mapping[str, Any]) -> None:
    with replace_atomically(path) as file:
        file.write(json.dumps(run, indent=1).encode() + b"\n")


def describe_run(
    model: Model,
    *,
    seed: int,
    batch: int,
    question_aware: bool,
    methods: Sequence[str],
    tasks: Sequence[str],
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Returns the content of run.json for a run of this model, on this machine, now."""
    return {
        "model": model.name,
        "digest": digest(model.name),
        "weights": model.fingerprint,
        "dtype": model.dtype.name,
        "seed": seed,
        "batch": batch,
        "question_aware": question_aware,
        "device": jax.devices()[0].device_kind,
        "methods": list(methods),
        "tasks": list(tasks),
        "lengths": list(lengths),
        "machine": machine(),
        "kvjax": version("kvjax"),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def digest(name: str) -> str | None:
    """Returns SHA-256 over a checkpoint's configuration and the digests of its parts; None without a checkpoint."""
    where = find_checkpoint(name)
    if not (where / checkpoint.MANIFEST).is_file():
        return None
    record = checkpoint.read_manifest(where)
    return hashlib.sha256(json.dumps([record.config.to_json(), record.digests], sort_keys=True).encode()).hexdigest()
