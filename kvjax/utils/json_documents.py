"""Text and JSON that somebody else wrote, or that a disk damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvjax.errors import KvjaxError

DEEPEST = 100  # lists and objects inside each other: far more than any file has, far less than Python can walk


def loads(content: str | bytes) -> Any:
    """What a JSON document says; raises ValueError for what is none, no UTF-8, or nested beyond DEEPEST."""
    text = content.decode("utf-8") if isinstance(content, bytes) else content
    try:
        found = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    # A document is no deeper than it has brackets, so that most are not walked through.
    if text.count("[") + text.count("{") > DEEPEST and _is_deeper(found, DEEPEST):
        raise _too_deep()
    return found


def parse_object(content: str | bytes, where: str | Path, remedy: str = "copy it again") -> dict[str, Any]:
    """The JSON object of a document; raises KvjaxError naming where it is, and the remedy, for anything else."""
    try:
        found = loads(content)
    except ValueError as e:
        raise KvjaxError(f"{where} is not valid JSON ({e}); {remedy}") from e
    if not isinstance(found, dict):
        raise KvjaxError(f"{where} does not hold a JSON object; {remedy}")
    return found


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects are nested more than {DEEPEST} deep")


def _is_deeper(found: Any, levels: int) -> bool:
    """Whether lists and objects are nested deeper than so many levels."""
    level = [found]
    for _ in range(levels + 1):
        held = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [x for values in held for x in values]
        if not level:
            return False
    return True
