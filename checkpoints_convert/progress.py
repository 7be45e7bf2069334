"""A progress bar over the bytes of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from checkpoints_convert import convert


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[convert.Progress]:
    """Shows a bar on stderr from the first report on, so that a checkpoint refused before shows none."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
    task = bar.add_task(title, total=None)

    def show(name: str, done: int, total: int) -> None:
        bar.update(task, description=f"{title} {name}".rstrip(), completed=done, total=total)
        bar.start()

    try:
        yield show
    finally:
        bar.stop()
