"""Files: texts that are read, and what is written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
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

    Whatever goes wrong before leaves `path` as it was, and nothing beside it. Raises KvjaxError for a path at which no
    file can be made.
    """
    if path.is_dir():
        raise KvjaxError(f"cannot write {path}, which is a folder; give the path of a file in it")
    fresh = path.parent / f".kvjax-{secrets.token_hex(8)}.partial"  # not tempfile: its files are their owner's alone
    file = _created(fresh, path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            fresh.unlink(missing_ok=True)
        raise


def _created(fresh: Path, path: Path) -> BinaryIO:
    """A new file that shall become `path`; raises KvjaxError, by that path, where there can be none."""
    try:
        return fresh.open("xb")
    except OSError as e:
        raise KvjaxError(
            f"cannot write {path} ({e.strerror}); give a path in a folder that exists and may be written"
        ) from e
