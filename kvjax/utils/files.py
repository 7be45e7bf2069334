"""Text files to read, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, BinaryIO

import filelock

from kvjax.errors import KvjaxError


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Returns the path with the home directory for a leading `~`, which a shell leaves in `--out=~/x` and in Python.

    Raises KvjaxError for what is no path.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
        raise KvjaxError(f"{path!r:.80} is no path; give a text or a pathlib.Path")
    expanded = Path(os.path.expanduser(path))
    # A Path of "./~x" is one of "~x", which the next call would expand.
    return expanded.absolute() if str(expanded).startswith("~") else expanded


class Unwritable(KvjaxError):
    """A path that the file system does not let be written."""


def make_folder(path: str | os.PathLike[str], option: str = "") -> Path:
    """Makes a folder to write into, if need be, before the work whose results it is for.

    Args:
      path: of the folder.
      option: the option or argument that gave the path, for the error.

    Returns:
      The path, with the home directory for `~`.

    Raises:
      KvjaxError: the folder cannot be made or written.
    """
    folder = expand_user(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else "it may not be written"
    except FileExistsError:
        problem = "there is a file of that name" if os.path.exists(folder) else "it is a link that leads nowhere"
    except OSError as e:
        problem = e.strerror or str(e)
    if problem:
        named = f"{option} {folder}" if option else str(folder)
        raise Unwritable(f"cannot write into {named} ({problem}); give a folder that exists or can be made")
    return folder


def read_text_file(path: Path | Traversable, name: str, content: bytes | None = None) -> str:
    """Reads a UTF-8 file as it is, but for a byte order mark at its beginning, which belongs to the file.

    Raises KvjaxError with `name`, the option or argument that gave the path, if that fails. `content` is that of a
    stream, which has no path.
    """
    try:
        return (path.read_bytes() if content is None else content).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise KvjaxError(f"cannot read {name} {path} ({getattr(e, 'strerror', e)}); give a UTF-8 text file") from e


def parse_json_object(content: str | bytes, name: str | Path, remedy: str = "copy it again") -> dict[str, Any]:
    """Parses a JSON object; raises KvjaxError with the document's name and the remedy for anything else."""
    try:
        value = json.loads(content)
        problem = "" if isinstance(value, dict) else "does not hold a JSON object"
    except (ValueError, RecursionError) as e:  # the latter for lists in lists a thousand deep
        problem = f"is not valid JSON ({e})"
    if problem:
        raise KvjaxError(f"{name} {problem}; {remedy}")
    return value


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to write into; it takes the place of `path` when the block ends and all of it is on disk.

    If anything fails before, `path` stays as it was and no other file remains. A link stays, and its target is
    replaced.

    Raises:
      KvjaxError: the file cannot be made or written; the message has its path.
    """
    path = Path(os.path.realpath(path))
    if os.path.exists(path) and not os.path.isfile(path):  # unlike a Path's, these take names that are too long
        problem = (
            "a folder; give the path of a file in it" if path.is_dir() else "a device or pipe; give the path of a file"
        )
        raise KvjaxError(f"cannot write {path}, which is {problem}")
    fresh = path.parent / f".kvjax-{secrets.token_hex(8)}.partial"  # not tempfile: only the owner may read its files
    try:
        with fresh.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # without it, a crash after the rename may leave an empty file
        fresh.replace(path)
    except OSError as e:
        remedy = "give a path in a folder that exists, may be written and has room"
        raise KvjaxError(f"cannot write {path} ({e.strerror or e}); {remedy}") from e
    finally:
        with contextlib.suppress(OSError):  # the first error is the one to report
            fresh.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Writes a UTF-8 text, in the place of a file only once all of it is on disk; returns the path.

    Raises:
      KvjaxError: the file cannot be written; the message has its path.
    """
    content = text.encode(errors="backslashreplace")  # a file's name need not be UTF-8
    if os.path.exists(path) and not path.is_file() and not path.is_dir():  # a pipe or a terminal has nothing to keep
        path.write_bytes(content)
        return path
    with replace_atomically(path) as file:
        file.write(content)
    return path


class Busy(KvjaxError):
    """Another process writes there."""


@contextlib.contextmanager
def lock(file: Path, folder: Path) -> Iterator[None]:
    """Lets one process at a time write `folder`; the lock ends with its process, however that ends.

    Args:
      file: stands for the folder, which may not exist yet; it is removed at the end.
      folder: what is written, for the error.

    Raises:
      Busy: another process holds the lock.
      Unwritable: the file cannot be made.
    """
    try:
        file.touch()  # a lock that cannot be made for another reason would count as held
    except OSError as e:
        raise Unwritable(f"cannot write into {file.parent} ({e.strerror}); give a folder that may be written") from e
    try:
        with filelock.FileLock(file, blocking=False):
            try:
                yield
            finally:
                # While it is locked, so that a process that has opened it sees its name gone, and makes a new one.
                file.unlink(missing_ok=True)
    except filelock.Timeout:
        raise Busy(f"another process writes {folder}; wait until it is done, or choose another directory") from None


def check_output(out: Path, source: Path | None = None, option: str = "") -> Path:
    """Makes the folder of a file to write, before the work whose result it gets, and returns the file's path.

    Raises:
      KvjaxError: `out` is a folder, or, by whatever path, the file `source` that `option` reads; or its folder cannot
        be made or written.
    """
    out = expand_user(out)
    make_folder(out.parent)
    try:
        out.lstat()
    except FileNotFoundError:
        pass
    except OSError as e:  # as for a name that is too long
        raise Unwritable(f"cannot write {out} ({e.strerror}); give another path") from e
    is_source = source is not None and os.path.isfile(out) and source.is_file() and out.samefile(source)
    if os.path.isdir(out) or is_source:
        problem = f"the file that {option} reads; write to another one" if is_source else "a folder; name a file in it"
        raise KvjaxError(f"{out} is {problem}")
    return out
