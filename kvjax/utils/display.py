"""Text and HTML that values show in a shell or a notebook."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Makes a small HTML table; numbers get thousands separators, everything else is escaped."""

    def cell(tag: str, x: Any) -> str:
        is_number = isinstance(x, int | float)
        text = f"{x:,}" if isinstance(x, int) else f"{x:,.1f}" if is_number else str(x)
        return f'<{tag} style="text-align: {"right" if is_number else "left"}">{html.escape(text)}</{tag}>'

    head = "".join(cell("th", x) for x in headings)
    body = "".join(f"<tr>{''.join(cell('td', x) for x in row)}</tr>" for row in rows)
    return f"<table><caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def count(number: int, noun: str) -> str:
    """Returns a number and its noun: "1 task", "1,024 tasks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorten(text: str, most: int = 60) -> str:
    """Returns the repr of a text, cut after `most` characters."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")


class StatusLine:
    """One line on stderr that shows the current activity and disappears at the end.

    Args:
      visible: None shows it on a terminal and in a notebook only.
    """

    def __init__(self, visible: bool | None = None):
        from rich.console import Console

        self._console = Console(stderr=True)
        # Rich would need ipywidgets in a notebook, which Colab and a plain Jupyter may not have.
        self._plain = self._console.is_jupyter or not self._console.is_terminal
        self._visible = (self._console.is_jupyter or self._console.is_terminal) if visible is None else visible
        self._status = None
        self._num_written = 0

    def __enter__(self) -> StatusLine:
        return self

    def say(self, text: str) -> None:
        """Replaces the text."""
        if not self._visible:
            return
        most = self._console.width - 4  # room for the spinner; a line that wraps cannot be overwritten
        text = text if len(text) <= most else text[: most - 1] + "…"
        if self._plain:
            print("\r" + text.ljust(self._num_written), end="", file=sys.stderr, flush=True)
            self._num_written = len(text)
            return
        from rich.text import Text  # a plain string's brackets would be read as markup

        if self._status is None:
            self._status = self._console.status(Text(text))
            self._status.start()
        else:
            self._status.update(Text(text))

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
        elif self._num_written:
            print("\r" + " " * self._num_written + "\r", end="", file=sys.stderr, flush=True)
