"""Files: texts that are read, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvjax.errors import KvjaxError


def text_of(path: Path, called: str) -> str:
    """The text of a UTF-8 file; raises KvjaxError, by what the file is called, for one that cannot be read as such."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise KvjaxError(f"cannot read {called} {path} ({e}); give a UTF-8 text file") from e


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which takes the place of `path` once all of it is on disk.

    Whatever goes wrong before leaves `path` as it was, and nothing beside it. Of a link the file that it leads to is
    replaced. Raises KvjaxError for a path at which no file can be made.
    """
    path = Path(os.path.realpath(path))
    if os.path.isdir(path):
        raise KvjaxError(f"cannot write {path}, which is a folder; give the path of a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise KvjaxError(f"cannot write {path}, which is a device or pipe; give the path of a file")
    fresh = path.parent / f".kvjax-{secrets.token_hex(8)}.partial"  # not tempfile: its files are their owner's alone
    with _naming(path):
        file = fresh.open("xb")
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with _naming(path):
            fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            fresh.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raises KvjaxError, by this path, where there can be no file."""
    try:
        yield
    except OSError as e:
        raise KvjaxError(
            f"cannot write {path} ({e.strerror}); give a path in a folder that exists and may be written"
        ) from e


def write_text(path: Path, text: str) -> Path:
    """Writes a UTF-8 text, in the place of a file only once all of it is on disk; returns the path.

    Raises:
      KvjaxError: the file cannot be written; the message has its path.
    """
    content = text.encode(errors="backslashreplace")  # a file's name need not be UTF-8
    try:
        if path.exists() and not path.is_file():  # a pipe or a terminal has nothing to keep
            path.write_bytes(content)
        else:
            with replacing(path) as file:
                file.write(content)
    except OSError as e:
        raise KvjaxError(f"cannot write {path} ({e.strerror}); make room there, or write elsewhere") from e
    return path


def check_not_input(source: Path, option: str, out: Path) -> None:
    """Raises KvjaxError if writing `out` would replace the file that `option` reads, by whatever path."""
    if out.is_file() and source.is_file() and out.samefile(source):
        raise KvjaxError(f"{out} is the file that {option} reads, and would be lost; write to another one")
