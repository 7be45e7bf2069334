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
    too_deep = ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
    try:
        value = json.loads(text)
    except RecursionError:
        raise too_deep from None
    # Level by level, since recursion is what deep documents break; a document is no deeper than it has brackets, so
    # that most are not walked through.
    level = [value] if text.count("[") + text.count("{") > MAX_DEPTH else []
    for _ in range(MAX_DEPTH + 1):
        containers = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [x for values in containers for x in values]
    if level:
        raise too_deep
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
