"""Locks that let one process at a time write a folder. They end with their process, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvjax.errors import KvjaxError


class Busy(KvjaxError):
    """Another process writes there."""


def lock_folder(folder: Path, file: Path | None = None) -> int:
    """Locks a folder, which is made if need be, or a file that stands for one that does not exist yet.

    Returns the file descriptor to close, and raises as `claim`.
    """
    while True:
        if file is None:
            folder.mkdir(parents=True, exist_ok=True)
            opened = os.open(folder, os.O_RDONLY)
        else:
            opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            claim(opened, folder)
        except BaseException:
            os.close(opened)
            raise
        # Between opening and locking, the last owner may have removed the path: that lock would exclude nobody.
        if is_open_path(file or folder, opened):
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
