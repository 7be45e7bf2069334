"""Parts of a run: cells divided among processes that never meet, such as the tasks of a job array.

Every part makes the whole list of cells, takes its own, and writes into a folder of its own, OUT/part-3-of-8. All parts
together are the run: `merge` puts them together again. Beside its records a part keeps the list of all cells, so that
the merge knows what is missing.

OUT/part-3-of-8/cells.json   groups of methods, and of each cell its part, its group, its task and its cases
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.errors import KvjaxError
from kvjax.eval.run import store
from kvjax.eval.run.cells import Cell, fingerprint
from kvjax.eval.run.context_reader import padded_width
from kvjax.utils.files import replace_atomically

CELLS = "cells.json"
MAX_PARTS = 100_000
JOB_COMPLETIONS = "JOB_COMPLETIONS"
"""Environment variable with the `.spec.completions` of a Kubernetes Indexed Job, which sets only the pod's index."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One of `count` parts; the first has number 1."""

    number: int
    count: int
    # The shell command of the whole run, by which a merge says how to run parts that are missing.
    command: str = dataclasses.field(default="", compare=False)

    def __post_init__(self):
        if not 1 <= self.number <= self.count <= MAX_PARTS:
            raise KvjaxError(
                f"there is no part {self.number}/{self.count}; parts are numbered from 1, as in 3/8, up to {MAX_PARTS}"
            )

    def __str__(self) -> str:
        return f"part {self.number} of {self.count}"

    @property
    def folder(self) -> str:
        """Name of its folder in the run's."""
        return f"part-{self.number}-of-{self.count}"


def parse_part(text: str, command: str = "") -> Part:
    """Parses a part such as "3/8"; raises KvjaxError for any other text."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text, re.ASCII)
    if not found:
        raise KvjaxError(f"a part is a number and how many there are, such as 3/8 (or auto, or off), got {text!r:.60}")
    return Part(int(found[1]), int(found[2]), command)


def detect_part(environment: Mapping[str, str], num_processes: int = 1) -> tuple[Part, str] | None:
    """Finds the part that a job array gives to this process.

    A SLURM array sets SLURM_ARRAY_TASK_ID, _COUNT, _MIN, _MAX and _STEP; its ids need not start at 0 or 1. A Kubernetes
    Indexed Job sets JOB_COMPLETION_INDEX, and its manifest has to set JOB_COMPLETIONS.

    Args:
      environment: the environment variables.
      num_processes: processes that run together as one (`jax.process_count`). Where there are several, an Indexed Job
        counts those, and its index is no part.

    Returns:
      The part, and the variables that say so, in words; None outside of such a job.

    Raises:
      KvjaxError: the variables do not say which part of how many this is.
    """

    def number(name: str) -> int | None:
        text = environment.get(name, "").strip()
        if not text:
            return None
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
            raise KvjaxError(f"{name} is {text!r:.60}, and not a whole number; {remedy}")
        return int(text)

    remedy = "say which part this is, as in --part 3/8, or --part off for the whole run"
    task, index = number("SLURM_ARRAY_TASK_ID"), number("JOB_COMPLETION_INDEX") if num_processes == 1 else None
    if task is not None and index is not None:
        raise KvjaxError(f"both SLURM_ARRAY_TASK_ID={task} and JOB_COMPLETION_INDEX={index} are set; {remedy}")
    if task is not None:
        count, first, last = (number(f"SLURM_ARRAY_TASK_{name}") for name in ("COUNT", "MIN", "MAX"))
        if count is None or first is None or last is None:
            raise KvjaxError(
                f"SLURM_ARRAY_TASK_ID={task} is set without SLURM_ARRAY_TASK_COUNT, _MIN and _MAX, which say of how "
                f"many tasks this is one; {remedy}"
            )
        step = max((last - first) // max(count - 1, 1), 1)
        # SLURM says a step for a list of ids, too, so that only another one than 1 tells more than the ids do.
        is_even = first + step * (count - 1) == last and (number("SLURM_ARRAY_TASK_STEP") or 1) in (1, step)
        if not is_even or (task - first) % step or not first <= task <= last:
            raise KvjaxError(
                f"SLURM_ARRAY_TASK_ID={task} is one of {count} from {first} to {last}, which are not evenly spaced, as "
                f"after sbatch --array=1,3,7; {remedy}. To run some parts again: --part $SLURM_ARRAY_TASK_ID/8"
            )
        where = f"SLURM_ARRAY_TASK_ID={task}, one of {count} from {first} to {last}"
        return Part((task - first) // step + 1, count), where
    if index is not None:
        count = number(JOB_COMPLETIONS)
        if count is None:
            raise KvjaxError(
                f"JOB_COMPLETION_INDEX={index} says that this is a pod of an Indexed Job, and nothing says of how "
                f"many; set {JOB_COMPLETIONS} to the job's .spec.completions, or {remedy}"
            )
        if index >= count:
            raise KvjaxError(
                f"JOB_COMPLETION_INDEX={index} is beyond {JOB_COMPLETIONS}={count}; set {JOB_COMPLETIONS} to the job's "
                ".spec.completions"
            )
        return Part(index + 1, count), f"JOB_COMPLETION_INDEX={index} and {JOB_COMPLETIONS}={count}"
    return None


def assign_parts(cells: Sequence[Cell], count: int, question_aware: bool) -> list[int]:
    """Divides cells into parts of nearly equal work, in tokens.

    A part's cells have neighboring lengths, since each length is a program to compile for each method. Of all such
    divisions this is one whose largest part is as small as possible.

    Args:
      cells: all cells of the run.
      count: of parts.
      question_aware: the run's option.

    Returns:
      The number of each cell's part, from 1. A part is left without cells where there are few.
    """
    groups = {methods: i for i, methods in enumerate(dict.fromkeys(cell.methods for cell in cells))}

    def programs(cell: Cell) -> tuple:
        longest = max(len(case.context) for case in cell.batch.cases)
        return groups[cell.methods], cell.is_speed, padded_width(longest), cell.index

    in_order = sorted(cells, key=programs)
    work = [max(cell.count_tokens(question_aware) * len(cell.methods), 1) for cell in in_order]
    numbers = {}
    for number, (start, end) in enumerate(itertools.pairwise(_cut_evenly(work, count)), 1):
        numbers |= {cell.index: number for cell in in_order[start:end]}
    return [numbers[cell.index] for cell in cells]


def _cut_evenly(work: Sequence[int], count: int) -> list[int]:
    """The `count + 1` ends of runs of pieces, of which the largest is as small as it can be, and all near the mean.

    No run is empty unless there are fewer pieces than runs.
    """
    ends = [0, *itertools.accumulate(work)]
    total = ends[-1]

    def fill(ends: Sequence[int], bound: int) -> list[int]:
        cuts = [0]
        for _ in range(count):
            cuts.append(bisect.bisect_right(ends, ends[cuts[-1]] + bound) - 1)
        return cuts

    low, high = max(work, default=0), total
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fill(ends, middle)[-1] == len(work) else (middle + 1, high)
    # No cut may lie before these, or the parts after it would exceed the bound.
    earliest = [len(work) - cut for cut in reversed(fill([total - x for x in reversed(ends)], low))]
    cuts = [0]
    for number in range(1, count + 1):
        latest = bisect.bisect_right(ends, ends[cuts[-1]] + low) - 1
        target = bisect.bisect_left(ends, total * number / count)
        if target and ends[target] - total * number / count > total * number / count - ends[target - 1]:
            target -= 1  # the nearer of the two
        # A piece for each run after this one, or as many as there are.
        most = max(len(work) - (count - number), cuts[-1] + 1)
        cuts.append(min(max(target, earliest[number], cuts[-1] + 1), latest, most, len(work)))
    return cuts


def describe_cells(
    cells: Sequence[Cell], numbers: Sequence[int], part: Part, hashes: Mapping[str, str]
) -> tuple[bytes, dict[str, Any]]:
    """Describes the division of a run.

    Args:
      cells: all cells of the run.
      numbers: of their parts, as `assign_parts` gives them.
      part: one of the parts.
      hashes: of the methods, by name.

    Returns:
      The content of cells.json, which is the same for all parts, and the entry "part" of the part's run.json.
    """
    groups = list(dict.fromkeys(cell.methods for cell in cells))
    listed = [
        {
            "part": number,
            "group": groups.index(cell.methods),
            "task": cell.task,
            "keys": [c.key for c in cell.batch.cases],
        }
        for cell, number in zip(cells, numbers, strict=True)
    ]
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in listed)
    head = f'"parts": {part.count},\n"groups": {json.dumps(groups, ensure_ascii=False)}'
    content = f'{{{head},\n"cells": [\n{lines}\n]}}\n'.encode(errors="backslashreplace")
    cases = [[cell.task, c.key, fingerprint(c)] for cell in cells for c in cell.batch.cases]
    entry = dataclasses.asdict(part) | {
        "cells": _digest(content),
        "cases": _digest(json.dumps([sorted(hashes.items()), cases]).encode()),
    }
    return content, entry


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def write_cells(directory: Path, content: bytes) -> None:
    """Writes cells.json of a part."""
    with replace_atomically(directory / CELLS) as file:
        file.write(content)


def read_cells(directory: Path, digest: str) -> dict[str, Any]:
    """Reads cells.json of a part; raises KvjaxError if it is missing or does not have this digest."""
    path = directory / CELLS
    try:
        content = path.read_bytes()
    except OSError as e:
        raise KvjaxError(f"{path} is missing ({e.strerror}); copy it from another part of the same run") from e
    if _digest(content) != digest:
        raise KvjaxError(f"{path} is damaged; copy it from another part of the same run")
    return json.loads(content)


def check_folder(directory: Path, part: Part | None) -> None:
    """Raises KvjaxError if a run, or a part of one, would write beside what does not belong to it.

    Args:
      directory: the run's --out.
      part: the part that is about to run; None for a whole run.
    """
    others = [other for other in find_parts(directory).values() if part is None or other.count != part.count]
    has_run = (directory / store.RUN).is_file()
    if has_run and store.MERGED in store.read_run(directory):
        has_run, others = False, others if part is not None else []
    if others and part is None:
        raise KvjaxError(
            f"{directory} holds {others[0].folder}: a run in parts, which a whole one would mix with. Put the parts "
            f"together first, by kvjax report {directory}, or choose another --out"
        )
    if others:
        raise KvjaxError(
            f"{directory} holds {others[0].folder}, and this is {part}: give --part N/{others[0].count}, or choose "
            "another --out"
        )
    if part is not None and has_run:
        raise KvjaxError(f"{directory} holds a whole run, and this is {part} of one; choose another --out")


def find_parts(directory: Path) -> dict[Path, Part]:
    """Returns the folders of parts in a run's folder, by number."""
    found = {}
    for path in directory.glob("part-*-of-*"):
        numbers = re.fullmatch(r"part-(\d{1,9})-of-(\d{1,9})", path.name, re.ASCII)
        if numbers and path.is_dir():
            found[path] = Part(int(numbers[1]), int(numbers[2]))
    return dict(sorted(found.items(), key=lambda item: (item[1].count, item[1].number)))
