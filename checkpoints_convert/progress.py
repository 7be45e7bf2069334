"""A bar while weights are read and written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from checkpoints_convert import convert as converting


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[converting.Progress]:
    """A bar on stderr over the bytes of the weights."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda name, done, total: bar.update(task, description=f"{title} {name}", completed=done, total=total)
