"""JSON documents that somebody else wrote, or that a disk damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvjax.errors import KvjaxError

MAX_DEPTH = 100
"""Most levels of nested lists and objects: far more than any file has, far less than Python can recurse."""


def loads(content: str | bytes) -> Any:
    """Parses a JSON document; raises ValueError if it is not JSON in UTF-8, or nested beyond MAX_DEPTH."""
    text = content.decode("utf-8") if isinstance(content, bytes) else content
    try:
        value = json.loads(text)
        # A document is no deeper than it has brackets, so that most are not walked through.
        is_too_deep = text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH)
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
    return value


def parse_object(content: str | bytes, name: str | Path, remedy: str = "copy it again") -> dict[str, Any]:
    """Parses a JSON object; raises KvjaxError with the document's name and the remedy for anything else."""
    try:
        value = loads(content)
    except ValueError as e:
        raise KvjaxError(f"{name} is not valid JSON ({e}); {remedy}") from e
    if not isinstance(value, dict):
        raise KvjaxError(f"{name} does not hold a JSON object; {remedy}")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels + 1):  # level by level, since recursion is what deep documents break
        containers = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [x for values in containers for x in values]
        if not level:
            return False
    return True
