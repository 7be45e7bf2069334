"""How values show themselves in a shell or a notebook."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A small HTML table under a title; numbers with separators, everything else escaped."""

    def cell(tag: str, x: Any) -> str:
        number = isinstance(x, int | float)
        text = f"{x:,}" if isinstance(x, int) else f"{x:,.1f}" if number else str(x)
        return f'<{tag} style="text-align: {"right" if number else "left"}">{html.escape(text)}</{tag}>'

    head = "".join(cell("th", x) for x in heads)
    body = "".join(f"<tr>{''.join(cell('td', x) for x in row)}</tr>" for row in rows)
    return f"<table><caption>{html.escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def shorten(text: str, most: int = 60) -> str:
    """A text as Python writes it, cut where it is long."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")


class StatusLine:
    """One line on stderr that says what is being done, and is gone afterwards.

    visible: by default on a terminal and in a notebook, and nowhere else.
    """

    def __init__(self, visible: bool | None = None):
        from rich.console import Console

        self._console = Console(stderr=True)
        # Rich would need ipywidgets in a notebook, which Colab and a plain Jupyter may not have.
        self._plain = self._console.is_jupyter or not self._console.is_terminal
        self._visible = (self._console.is_jupyter or self._console.is_terminal) if visible is None else visible
        self._status = None
        self._written = 0

    def __enter__(self) -> StatusLine:
        return self

    def say(self, text: str) -> None:
        """Puts a text in place of the last one."""
        if not self._visible:
            return
        most = self._console.width - 4  # with the spinner; a line that wraps cannot be taken back
        text = text if len(text) <= most else text[: most - 1] + "…"
        if self._plain:
            print("\r" + text.ljust(self._written), end="", file=sys.stderr, flush=True)
            self._written = len(text)
            return
        from rich.text import Text  # as it is, whatever brackets it has

        if self._status is None:
            self._status = self._console.status(Text(text))
            self._status.start()
        else:
            self._status.update(Text(text))

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
        elif self._written:
            print("\r" + " " * self._written + "\r", end="", file=sys.stderr, flush=True)
