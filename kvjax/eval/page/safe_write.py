"""Texts that are written for people: pages and tables, of which the one of before stays until the new one is whole."""

from __future__ import annotations

from pathlib import Path

from kvjax.errors import KvjaxError
from kvjax.utils.files import replace_atomically


def write(path: Path, text: str) -> Path:
    """Writes a UTF-8 text in the place of a file; raises KvjaxError, by its path, where it cannot."""
    content = text.encode(errors="backslashreplace")  # a file's name need not be UTF-8
    try:
        if path.exists() and not path.is_file():  # a pipe or a terminal has nothing to keep
            path.write_bytes(content)
        else:
            with replace_atomically(path) as file:
                file.write(content)
    except OSError as e:
        raise KvjaxError(f"cannot write {path} ({e.strerror}); make room there, or write elsewhere") from e
    return path


def spare(read: Path, called: str, out: Path) -> None:
    """Raises KvjaxError where what is written would take the place of the file that is read, by whatever path."""
    if out.is_file() and read.is_file() and out.samefile(read):
        raise KvjaxError(f"{out} is the file that {called} reads, and would be lost; write to another one")
