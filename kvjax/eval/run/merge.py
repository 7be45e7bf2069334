"""Folders put together: the parts of a run, or several runs of one model, as if one process had made them."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvjax.errors import KvjaxError
from kvjax.eval.run import parts, store
from kvjax.eval.run.store import MERGED, RecordKey, record_key
from kvjax.utils import display
from kvjax.utils.files import lock, make_folder, replace_atomically

COMMANDS = 3  # commands for missing parts that an error shows one by one


@dataclasses.dataclass(frozen=True)
class _Folder:
    """The contents of a folder."""

    path: Path
    run: dict[str, Any]
    records: dict[RecordKey, dict[str, Any]]

    @property
    def part(self) -> dict[str, Any] | None:
        return self.run.get("part")


def needs_merge(directories: Sequence[Path]) -> bool:
    """Whether a report of these folders puts records together first: several folders, or parts of a run."""
    if len(directories) != 1 or parts.find_parts(directories[0]):
        return True
    return (directories[0] / store.RUN).is_file() and "part" in store.read_run(directories[0])


def merge(
    directories: Sequence[Path],
    out: Path | None = None,
    *,
    partial: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Puts folders together into one run.

    Args:
      directories: folders of parts, folders of runs, or a folder that holds parts, which stands for all of them.
      out: where the records go; by default the folder that holds the parts. What an earlier merge wrote there is
        replaced; records that were added to it since are kept, after those of the parts.
      partial: whether parts and records may be missing.
      say: called with a line for what is unusual and no error.

    Returns:
      The folder with records.jsonl and run.json of the whole.

    Raises:
      KvjaxError: the folders do not belong together, hold different records of one case, or some are missing; the
        message has the commands that make those.
    """
    paths: list[Path] = []
    for directory in directories:
        own = list(parts.find_parts(directory))
        if own and (directory / store.RUN).is_file() and MERGED not in store.read_run(directory):
            raise KvjaxError(
                f"{directory} holds a whole run of its own and folders of parts; give those that belong together, and "
                "--out for the result"
            )
        paths += own or [directory]
    _check_distinct(paths)
    read = [_read_folder(path) for path in paths]
    folders = [folder for folder in read if folder is not None]
    if not folders:
        raise KvjaxError(f"none of {_list_names(paths)} has records; make them by kvjax eval")
    if out is None:
        out = paths[0].parent
        if not set(paths) <= parts.find_parts(out).keys():
            raise KvjaxError(
                f"{_list_names(paths)} are not the parts of one folder; say by --out where the merged run goes"
            )
    earlier = _read_earlier(out, {path.resolve() for path in paths})
    everything = [*folders, *([earlier] if earlier else [])]
    for folder in everything[1:]:
        _check_pinned(everything[0], folder)
    cells = _common_cells(folders)
    union: dict[RecordKey, dict[str, Any]] = {}
    where: dict[RecordKey, Path] = {}
    for folder in folders:
        for key, record in folder.records.items():
            if union.setdefault(key, record) != record:
                fields = sorted(f for f in {*record, *union[key]} if record.get(f) != union[key].get(f))
                raise KvjaxError(
                    f"{where[key]} and {folder.path} hold different records of {key[0]!r} on {key[2]!r} "
                    f"({', '.join(fields)}); they are not of one run: leave one of the folders out"
                )
            where.setdefault(key, folder.path)
    if earlier:
        union = {**union, **{key: record for key, record in earlier.records.items() if key not in union}}
        where = {key: where.get(key, out) for key in union}
    _check_cases(union, where)
    if cells is not None:
        part_of = {
            (method, cell["task"], key): cell["part"]
            for cell in cells["cells"]
            for method in cells["groups"][cell["group"]]
            for key in cell["keys"]
        }
        problem = _describe_missing(part_of, union, folders, cells["parts"], directories)
        if problem and not partial:
            raise KvjaxError(problem)
        if problem:
            say(problem)
    _write(out, _describe_run(everything, folders, say), list(union.values()))
    return out


def _check_distinct(paths: Sequence[Path]) -> None:
    seen: dict[Path, Path] = {}
    for path in paths:
        if (real := path.resolve()) in seen:
            raise KvjaxError(f"{path} is given twice ({seen[real]} and {path}); give each folder once")
        seen[real] = path


def _read_folder(path: Path) -> _Folder | None:
    """A folder's content; None for a part's folder in which nothing was written yet."""
    if not path.is_dir():
        raise KvjaxError(f"{path} is no folder; give folders that kvjax eval --out wrote")
    records = store.parse_records(path / store.RECORDS)
    if not records and not (path / store.RUN).is_file():
        if path in parts.find_parts(path.parent):
            return None
        raise KvjaxError(f"{path} holds no {store.RECORDS} with records; make them: kvjax eval --out {path}")
    return _Folder(path, store.read_run(path), {record_key(r): r for r in records})


def _read_earlier(out: Path, inputs: set[Path]) -> _Folder | None:
    """Finds what an earlier merge left in `out`, if anything; raises KvjaxError if a run of its own is there."""
    if out.resolve() in inputs:
        raise KvjaxError(f"{out} is one of the folders to merge; choose another --out")
    if not (out / store.RUN).is_file() and not (out / store.RECORDS).is_file():
        return None
    run = store.read_run(out)
    if MERGED not in run:
        raise KvjaxError(f"{out} holds a run of its own, which a merge would replace; choose another --out")
    return _Folder(out, run, {record_key(r): r for r in store.parse_records(out / store.RECORDS)})


def _check_pinned(first: _Folder, other: _Folder) -> None:
    """Raises KvjaxError if two folders are not of one model under the same options."""
    names = store.CONDITIONS if first.run.get("digest") else ("model", *store.CONDITIONS)
    changed = [
        f"{name} is {first.run.get(name)!r} and {other.run.get(name)!r}"
        for name in names
        if first.run.get(name) != other.run.get(name)
    ]
    if changed:
        raise KvjaxError(
            f"{first.path} and {other.path} do not belong together: {'; '.join(changed)}. Give folders of one model "
            "with the same options, on devices of one kind"
        )


def _common_cells(folders: Sequence[_Folder]) -> dict[str, Any] | None:
    """The list of cells that all parts share; None if no folder is a part's."""
    with_part = [(f, f.part) for f in folders if f.part is not None]
    if not with_part:
        return None
    if len(with_part) != len(folders):
        whole = next(f.path for f in folders if f.part is None)
        raise KvjaxError(
            f"{whole} is a whole run, and {with_part[0][0].path} is a part of one; merge the parts by themselves first"
        )
    first, part = with_part[0]
    for other, own in with_part[1:]:
        if any(own[name] != part[name] for name in ("count", "cells", "cases")):
            changed = [
                f"{name} are {first.run.get(name)} and {other.run.get(name)}"
                for name in ("methods", "tasks", "lengths")
                if first.run.get(name) != other.run.get(name)
            ]
            if own["count"] != part["count"]:
                changed.append(f"there are {part['count']} parts and {own['count']}")
            words = "; ".join(changed) or "their cases or methods differ (contexts, text, data, code or version)"
            raise KvjaxError(
                f"{first.path} and {other.path} are parts of different runs: {words}. Merge the parts of each run by "
                "themselves"
            )
    return parts.read_cells(first.path, part["cells"])


def _check_cases(records: dict[RecordKey, dict[str, Any]], where: dict[RecordKey, Path]) -> None:
    """Raises KvjaxError for a case or a method that is another one in another folder."""
    cases: dict[tuple, tuple[Any, RecordKey]] = {}
    for key, record in records.items():
        known = {("case", *key[1:]): record.get("case"), ("method", key[0]): record.get("method_hash")}
        for what, value in known.items():
            before, at = cases.setdefault(what, (value, key))
            if before != value:
                kind, name = ("case", key[2]) if what[0] == "case" else ("method", key[0])
                raise KvjaxError(
                    f"{kind} {name!r} is not the same in {where[at]} and {where[key]}: its code, text, data or the "
                    "version of kvjax differ. Give folders of one version, or delete the older one"
                )


def _describe_missing(
    part_of: dict[RecordKey, int],
    records: dict[RecordKey, dict[str, Any]],
    folders: Sequence[_Folder],
    count: int,
    directories: Sequence[Path],
) -> str:
    """Says which parts are missing or unfinished, and which commands run them; empty if all is there."""
    asked, missing = dict.fromkeys(range(1, count + 1), 0), dict.fromkeys(range(1, count + 1), 0)
    for key, number in part_of.items():
        asked[number] += 1
        missing[number] += key not in records
    numbers = [number for number in missing if missing[number]]
    if not numbers:
        return ""
    words = [
        f"part {n} ({missing[n]} of {display.count(asked[n], 'record')})" if missing[n] < asked[n] else f"part {n}"
        for n in numbers
    ]
    command = (folders[0].part or {}).get("command") or "kvjax eval .. (with the options of the other parts)"
    if len(numbers) <= COMMANDS:
        run = "; ".join(f"{command} --part {n}/{count}" for n in numbers)
    else:
        run = f"for part in {' '.join(map(str, numbers))}; do {command} --part $part/{count}; done"
    parent = folders[0].path.parent
    given = {folder.path.resolve() for folder in folders}
    others = [p for p, part in parts.find_parts(parent).items() if part.number in numbers and p.resolve() not in given]
    if others and parent not in directories:
        run = f"kvjax report {shlex.quote(str(parent))} takes all parts that are there; those that are not: {run}"
    return f"missing of {count} parts: {', '.join(words)}. Run them: {run}"


def _describe_run(everything: Sequence[_Folder], folders: Sequence[_Folder], say: Callable[[str], None]) -> dict:
    """The content of run.json for the whole."""
    first = folders[0].run
    grown = {
        name: list(dict.fromkeys(value for folder in everything for value in folder.run.get(name, ())))
        for name in ("methods", "tasks", "lengths")
    }
    versions: dict[tuple, Path] = {}
    names = {folder.path.name for folder in folders}
    before = [line for folder in everything for line in folder.run.get(MERGED, ())]
    merged = [line for line in before if line.partition(" (")[0] not in names]
    for folder in folders:
        machine, started = folder.run.get("machine", {}), folder.run.get("started")
        versions.setdefault((folder.run.get("kvjax"), machine.get("jax"), machine.get("jaxlib")), folder.path)
        merged.append(f"{folder.path.name} ({machine.get('processor')}, {machine.get('cores')} cores, {started})")
    if len(versions) > 1:
        each = ", ".join(f"kvjax {v[0]}, jax {v[1]} and jaxlib {v[2]} in {path}" for v, path in versions.items())
        say(f"the folders were made by different versions, whose numbers may differ in their last bits: {each}")
    started = min(folder.run.get("started", "") for folder in folders)
    whole = {name: value for name, value in first.items() if name not in ("part", "resumed")}
    return {**whole, **grown, "started": started, MERGED: merged}


def _write(out: Path, run: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    """Writes the merged run, run.json first: records without it would count as a run of their own."""
    make_folder(out, "--out")
    with lock(out / store.LOCK, out):
        with replace_atomically(out / store.RUN) as file:
            file.write(json.dumps(run, indent=1).encode() + b"\n")
        with replace_atomically(out / store.RECORDS) as file:
            for record in records:
                file.write(store.format_record(record))


def _list_names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths[:4])) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
