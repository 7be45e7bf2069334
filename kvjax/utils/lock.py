"""A folder that one process at a time writes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvjax.errors import KvjaxError


class Busy(KvjaxError):
    """Another process writes there."""


def locked(folder: Path) -> int:
    """The folder, made if need be, open under a lock that ends with this process, however it ends.

    Raises Busy as `claim` does. Close what is returned to give the lock back.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY)
        try:
            claim(opened, folder)
        except Busy:
            os.close(opened)
            raise
        if is_same(folder, opened):
            return opened
        os.close(opened)  # it was renamed or removed in between


def claim(opened: int, folder: Path) -> None:
    """Locks what is open, the folder or a file that stands for it; raises Busy while another process holds it."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(f"another process writes {folder}; wait until it is done, or choose another directory") from None


def is_same(folder: Path, opened: int) -> bool:
    """Whether the folder of this name is the one that is open."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(opened))
    except FileNotFoundError:
        return False
