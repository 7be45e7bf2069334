"""Local files of public benchmarks, and prompts cut into a context and a question in token ids."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import KvjaxError
from kvjax.eval.tasks.case import Case, Maker, Spec, TooShort
from kvjax.eval.tasks.texts import unended
from kvjax.models.model import Model
from kvjax.utils import json_documents


def folder(spec: Spec, source: str) -> Path:
    """The folder of public benchmarks; raises KvjaxError naming `source`, what to put where, if there is none."""
    if spec.data is None:
        raise KvjaxError(f"this task reads local files: name their folder with `--data DATA`, and put {source}")
    return Path(spec.data)


def lines(path: Path, fields: Mapping[str, type], source: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, or of one in .gz, checked for fields and their types; empty lines are left out.

    Raises KvjaxError for a missing file, saying which to put where, and for a bad line, with its number.
    """
    if not path.is_file():
        raise KvjaxError(f"{path} is missing; put {source}")
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _checked(line, f"{path}, line {number}", fields)
        except (EOFError, gzip.BadGzipFile, zlib.error) as e:
            raise KvjaxError(f"{path} is damaged ({e}); copy it again") from e


def _checked(line: bytes, where: str, fields: Mapping[str, type]) -> dict[str, Any]:
    try:
        row = json_documents.loads(line)
    except ValueError as e:
        raise KvjaxError(f"{where} is not JSON ({e}); copy the file again") from None
    if not isinstance(row, dict):
        raise KvjaxError(f"{where} is {type(row).__name__}, not an object with the fields {', '.join(fields)}")
    for name, kind in fields.items():
        if name not in row:
            raise KvjaxError(f"{where} has no field {name!r}, only {', '.join(row)}; is it the right file?")
        if not isinstance(row[name], kind):
            raise KvjaxError(f"{where}: field {name!r} must be {kind.__name__}, got {row[name]!r:.60}")
        if kind is list and not (row[name] and all(isinstance(x, str) for x in row[name])):
            raise KvjaxError(f"{where}: field {name!r} must be a list of at least one text, got {row[name]!r:.60}")
    return row


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """A text's ids i32[n], and the character at which each token starts, i32[n]."""

    ids: np.ndarray
    starts: np.ndarray

    def after(self, at: int) -> int:
        """How many last tokens start at character `at` or later."""
        early = np.flatnonzero(self.starts < at)
        return len(self.ids) - (int(early[-1]) + 1 if len(early) else 0)

    def without_middle(self, length: int, head: int, tail: int) -> Encoded:
        """At most `length` tokens of text head..tail: of more, length // 2 stay at each end (LongBench's pred.py).

        What stands before and after these characters, a chat template, stays and does not count; special tokens do.
        """
        last = self.after(tail)
        inside = len(self.ids) - last - int(((self.starts < head) & (self.starts >= 0)).sum())
        if inside <= length:
            return self
        back = last + length // 2
        front = len(self.ids) - back - (inside - 2 * (length // 2))
        keep = np.r_[:front, len(self.ids) - back : len(self.ids)]
        return Encoded(self.ids[keep], self.starts[keep])

    def split(self, at: int) -> tuple[np.ndarray, np.ndarray]:
        """(context, question): the question begins with the first token that starts at `at` or later; none is empty."""
        n = min(max(1, self.after(at)), len(self.ids) - 1)
        return self.ids[: len(self.ids) - n], self.ids[len(self.ids) - n :]


def encode(model: Model, text: str) -> Encoded:
    """Ids with the special tokens that the tokenizer puts first, without those it puts last (a model goes on here)."""
    out = model.text_tokenizer().inner.encode(text)
    end = unended(out)
    opened = zip(out.special_tokens_mask[:end], out.offsets[:end], strict=True)
    starts = [-1 if special else start for special, (start, _) in opened]
    return Encoded(np.array(out.ids[:end], np.int32), np.array(starts, np.int32))


def maker(make: Callable[[str, Model, Spec], Iterator[Case]], name: str, doc: str) -> Maker:
    """One of the tasks that `make` can make, with a docstring of its own, which lists of tasks show."""
    one = functools.partial(make, name)
    one.__doc__ = doc
    return one


def check_lengths(spec: Spec, least: int = 16) -> None:
    """Raises KvjaxError for a length that leaves no room for any prompt."""
    for length in spec.lengths:
        if length < least:
            raise TooShort(f"length {length} is too short for a prompt of this task; use {least} tokens or more")
