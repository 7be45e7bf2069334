"""How values show themselves in a shell or a notebook."""

from __future__ import annotations

import html
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


def shortened(text: str, most: int = 60) -> str:
    """A text as Python writes it, cut where it is long."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")
