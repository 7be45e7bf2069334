"""Text files to read, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvjax.errors import KvjaxError


def read_text_file(path: Path, name: str) -> str:
    """Reads a UTF-8 file; raises KvjaxError with `name`, the option or argument that gave the path, if that fails."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise KvjaxError(f"cannot read {name} {path} ({e}); give a UTF-8 text file") from e


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to write into; it takes the place of `path` when the block ends and all of it is on disk.

    If anything fails before, `path` stays as it was and no other file remains. A link stays, and its target is
    replaced.

    Raises:
      KvjaxError: if no file can be made at `path`.
    """
    path = Path(os.path.realpath(path))
    if os.path.isdir(path):
        raise KvjaxError(f"cannot write {path}, which is a folder; give the path of a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise KvjaxError(f"cannot write {path}, which is a device or pipe; give the path of a file")
    fresh = path.parent / f".kvjax-{secrets.token_hex(8)}.partial"  # not tempfile: only the owner may read its files
    with _name_path(path):
        file = fresh.open("xb")
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # without it, a crash after the rename may leave an empty file
        with _name_path(path):
            fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            fresh.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _name_path(path: Path) -> Iterator[None]:
    """Turns an OSError into a KvjaxError that names the path which the user gave."""
    try:
        yield
    except OSError as e:
        raise KvjaxError(
            f"cannot write {path} ({e.strerror}); give a path in a folder that exists and may be written"
        ) from e
