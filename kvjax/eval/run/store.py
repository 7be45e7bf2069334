"""A run on disk: records as JSON lines that survive a kill, and a description of the run.

DIR/records.jsonl    one line per method and case, whole batches at a time, in the order in which they were done
DIR/run.json         the model and its digests, the options, methods, tasks and lengths, the machine and versions
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from kvjax.errors import KvjaxError
from kvjax.eval.run.machine import machine, version
from kvjax.models import checkpoint
from kvjax.models.model import Model, find_checkpoint
from kvjax.utils.files import lock, make_folder, replace_atomically

RECORDS, RUN, LOCK = "records.jsonl", "run.json", ".lock"
# A run is continued under the same ones only; a model of no checkpoint has no digest, and is known by its name.
CONDITIONS = ("digest", "weights", "dtype", "seed", "batch", "question_aware", "device", "mesh")
FIELDS = {"method": str, "task": str, "key": str, "scores": list, "bytes": dict}
"""Fields of every record, with their types."""

MERGED = "merged"
"""Field of run.json: the folders that a run was put together from, each with its machine, in words."""

RecordKey = tuple[str, str, str]
"""(method, task, key of the case)"""


def record_key(record: Mapping[str, Any]) -> RecordKey:
    """Returns the method, task and case that a record is about."""
    return record["method"], record["task"], record["key"]


class Store:
    """The records of one run, owned by one process; `open_store` makes it.

    `on_append` is called with the records that `append` has written.
    """

    def __init__(self, directory: Path, run: Mapping[str, Any], records: Iterable[dict[str, Any]]):
        self._directory, self._run, self._is_described = directory, run, False
        self._records = {record_key(r): r for r in records}
        self.on_append: Callable[[Sequence[Mapping[str, Any]]], None] = lambda records: None

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records so far, sorted."""
        return sort_records(self._records.values(), self._run)

    def find(self, method: str, task: str, case: str) -> dict[str, Any] | None:
        """Returns the record of a method and a case, if there is one."""
        return self._records.get((method, task, case))

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Writes a batch of records at once and waits until it is on disk; records that exist stay as they are.

        Raises:
          KvjaxError: a record could not be read again, such as a score beyond 1; then nothing is written.
        """
        new = [dict(r) for r in records if record_key(r) not in self._records]
        lines = b""
        for r in new:
            problem = _find_problem(r)
            try:
                lines += format_record(r)
            except (TypeError, ValueError) as e:
                problem = f"cannot be written as JSON ({e})"
            if problem:
                raise KvjaxError(f"the record of {r['method']} on {r['key']} {problem}; fix the task or its metric")
        if not self._is_described:  # with the first record: a run that fails before it leaves no description behind
            with replace_atomically(self._directory / RUN) as file:
                file.write(json.dumps(self._run, indent=1).encode() + b"\n")
            self._is_described = True
        with (self._directory / RECORDS).open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        self._records |= {record_key(r): r for r in new}
        self.on_append(new)


class Follower(Store):
    """The store in those of several processes that do not write: it has no records, and drops what it is given."""

    def __init__(self) -> None:
        super().__init__(Path(), {}, ())

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Drops the records, which the process that writes has as well."""


@contextlib.contextmanager
def open_store(directory: str | Path, run: Mapping[str, Any]) -> Iterator[Store]:
    """Opens the store of a new run, or of one to be continued; a torn last line, left by a kill, is dropped.

    Args:
      directory: the run's folder.
      run: the result of `describe_run`; run.json is written before the first record is.

    Raises:
      KvjaxError: another process writes there, a line or run.json is damaged, or the folder holds another run.
    """
    directory = make_folder(directory)
    with lock(directory / LOCK, directory):
        records = parse_records(directory / RECORDS)
        if records or (directory / RUN).is_file():
            run = _continue_run(read_run(directory), run, directory)
        with (directory / RECORDS).open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        yield Store(directory, run, records)


def read(directory: str | Path) -> list[dict[str, Any]]:
    """Reads and sorts the records of a run, also of one that goes on; raises KvjaxError if there is none."""
    records = parse_records(Path(directory) / RECORDS)
    if not records:
        raise KvjaxError(f"{directory} holds no {RECORDS} with records; make them: kvjax eval --out {directory}")
    try:
        run = read_run(directory)
    except KvjaxError:
        run = {}  # records can be read without their description, and are then in the order in which they were made
    return sort_records(records, run)


def sort_records(records: Iterable[dict[str, Any]], run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sorts records by method, task, length and case, so that their order does not depend on who made them first.

    Args:
      records: of one run.
      run: the content of its run.json, whose methods and tasks come in the order of the list there.
    """
    records = list(records)
    methods, tasks = (
        {value: i for i, value in enumerate(dict.fromkeys([*run.get(listed, ()), *(r[name] for r in records)]))}
        for listed, name in (("methods", "method"), ("tasks", "task"))
    )

    def place(record: Mapping[str, Any]) -> tuple:
        length = record.get("about", {}).get("length") or 0
        return methods[record["method"]], tasks[record["task"]], length, record["key"]

    return sorted(records, key=place)


def read_run(directory: str | Path) -> dict[str, Any]:
    """Reads run.json; raises KvjaxError if it is missing or damaged."""
    path = Path(directory) / RUN
    try:
        run = json.loads(path.read_bytes())
        return {**run, "model": run["model"]}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as e:
        raise KvjaxError(f"{path} is missing or damaged ({e!r:.200}); copy it again, or choose another --out") from e


def format_record(record: Mapping[str, Any]) -> bytes:
    """Returns the line of a record; raises TypeError or ValueError for one that cannot be written as JSON."""
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")


def parse_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file's whole lines; there are none without a file.

    A last line without its end was torn by a kill.

    Raises:
      KvjaxError: a line is damaged.
    """
    records, data = [], path.read_bytes() if path.is_file() else b""
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
            problem = _find_problem(records[-1])
        except (ValueError, RecursionError) as e:
            problem = f"is no JSON ({e})"
        if problem:
            raise KvjaxError(
                f"line {number} of {path} {problem}; delete that line, and `kvjax eval` does its case again"
            )
    return records


def _find_problem(record: Any) -> str:
    """Says why a record is unusable, in words that follow its name; empty if it is good."""
    if not isinstance(record, dict):
        return f"is {type(record).__name__}, not a record"
    for name, kind in FIELDS.items():
        if not isinstance(record.get(name), kind):
            has = f"has {record[name]!r:.60} as" if name in record else "has no"
            return f"{has} {name!r}, which must be a {kind.__name__}"
    if not all(isinstance(x, int | float) and 0 <= x <= 1 for x in record["scores"]):
        return f"has {record['scores']!r:.60} as 'scores', which must be numbers from 0 to 1"
    return ""


def _continue_run(old: Mapping[str, Any], new: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The next content of run.json: it may gain methods, tasks and lengths."""
    conditions = CONDITIONS if new["digest"] else ("model", *CONDITIONS)
    changed = [f"{c} was {old.get(c)!r} and is now {new.get(c)!r}" for c in conditions if old.get(c) != new.get(c)]
    if old_part := old.get("part"):
        # A part has the cells of one list: those of another would be divided differently, so nothing can be added.
        conditions, part = ("methods", "tasks", "lengths"), new.get("part", {})
        changed += [f"{c} were {old.get(c)} and are now {new[c]}" for c in conditions if old.get(c) != new[c]]
        if any(old_part.get(c) != part.get(c) for c in ("number", "count")):
            changed.append(f"it is part {old_part['number']} of {old_part['count']}")
        elif not changed and any(old_part.get(c) != part.get(c) for c in ("cells", "cases")):
            changed.append("its cases or methods have changed (contexts, questions, text, data, code or version)")
    elif "part" in new:
        changed.append("it is no part")
    if changed:
        raise KvjaxError(
            f"{directory} holds another run: {'; '.join(changed)}. Choose another --out, or delete {directory}"
        )
    # What a run had before comes first, in its order, and nothing twice.
    grown = {}
    for name in ("methods", "tasks", "lengths"):
        both = [*old.get(name, ()), *new[name]]
        grown[name] = list(dict.fromkeys(both))
    resumption = {"at": new["started"], "kvjax": new["kvjax"], "machine": new["machine"]}
    return {**old, **grown, "resumed": [*old.get("resumed", ()), resumption]}


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
        **({} if model.mesh is None else {"mesh": dict(model.mesh.shape)}),
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
    if not checkpoint.is_checkpoint(where):
        return None
    record = checkpoint.read_manifest(where)
    return hashlib.sha256(json.dumps([record.config.to_json(), record.digests], sort_keys=True).encode()).hexdigest()
