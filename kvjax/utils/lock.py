"""Locks that let one process at a time write a folder. They end with their process, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from kvjax.errors import KvjaxError


class Busy(KvjaxError):
    """Another process writes there."""


def lock_folder(folder: Path) -> int:
    """Makes a folder if need be and locks it; returns the file descriptor to close, and raises as `claim`."""

    def open_folder() -> int:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder, os.O_RDONLY)

    return _open_locked(open_folder, folder, folder)


def lock_file(file: Path, folder: Path) -> int:
    """Locks a file that stands for a folder, as one that does not exist yet; otherwise as `lock_folder`."""
    return _open_locked(lambda: os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), file, folder)


def _open_locked(open_path: Callable[[], int], path: Path, folder: Path) -> int:
    while True:
        opened = open_path()
        try:
            claim(opened, folder)
        except BaseException:
            os.close(opened)
            raise
        # Between opening and locking, the last owner may have removed the path: that lock would exclude nobody.
        if is_open_path(path, opened):
            return opened
        os.close(opened)


def claim(opened: int, folder: Path) -> None:
    """Locks a file descriptor; raises Busy, which names the folder, while another process holds the lock."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(f"another process writes {folder}; wait until it is done, or choose another directory") from None


def is_open_path(path: Path, opened: int) -> bool:
    """Whether the file at `path` is the one that is open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(opened))
    except FileNotFoundError:
        return False
