"""Validates a method's components: right type, hashable, determined by their fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from kvjax.cache.eviction.scorers import Scorer
from kvjax.errors import KvjaxError


def check_component_type(name: str, value: Any, kind: Any) -> None:
    """Raises KvjaxError unless a component is of its type, a class or a union of classes."""
    if isinstance(value, type):
        raise KvjaxError(f"{name} is the class {value.__name__}, and must be a value of it, as {value.__name__}(...)")
    if isinstance(value, kind):
        return
    if isinstance(value, Scorer):
        scorer = type(value).__name__
        raise KvjaxError(
            f"{name} is a scorer; kvjax.method_api.make_selection({scorer}(...), budget) makes a selection of it"
        )
    expected = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
    raise KvjaxError(f"{name} must be a {expected}, got {value!r:.80}")


def check_hashable(name: str, value: Any) -> None:
    """Raises KvjaxError that names the part of a component without a hash, by which compiled programs are found."""
    for path, part in _walk(name, value):
        if type(part).__hash__ is not None:
            continue
        if dataclasses.is_dataclass(part):
            raise KvjaxError(f"{path} is a {type(part).__name__}, which must be a @dataclasses.dataclass(frozen=True)")
        raise KvjaxError(
            f"{path} is a {type(part).__name__}, which has no hash: a tuple has one; arrays go into a table, or are "
            "made where they are used"
        )


def uncompared_fields(name: str, value: Any) -> Iterator[str]:
    """Lists the fields that take no part in the comparison of a component, of classes that are not kvjax's own."""
    for path, part in _walk(name, value):
        if dataclasses.is_dataclass(part) and type(part).__module__.partition(".")[0] != "kvjax":
            yield from (f"{path}.{field.name}" for field in dataclasses.fields(part) if not field.compare)


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Walks through the compared fields of dataclasses and through tuples, innermost first: (path, value)."""
    # Programs are found by equality, so only compared fields matter. Innermost first, so that an error names the very
    # field at fault and not the component around it.
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.compare:
                yield from _walk(f"{path}.{field.name}", getattr(value, field.name, None))
    if isinstance(value, tuple) and type(value) is tuple:  # no named tuple
        for i, x in enumerate(value):
            yield from _walk(f"{path}[{i}]", x)
    yield path, value
