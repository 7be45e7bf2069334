"""Files: texts that are read, and what is written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvjax.core.types import KvjaxError


def text_of(path: Path, called: str) -> str:
    """The text of a UTF-8 file; raises KvjaxError, by what the file is called, for one that cannot be read as such."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise KvjaxError(f"cannot read {called} {path} ({e}); give a UTF-8 text file") from e


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which takes the place of `path` once all of it is on disk.

    Whatever goes wrong before leaves `path` as it was, and nothing beside it.
    """
    fresh = path.with_name(path.name + ".partial")
    try:
        with fresh.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            fresh.unlink(missing_ok=True)
        raise
