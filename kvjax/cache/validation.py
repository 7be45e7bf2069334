"""What may stand in a slot of a method: a value of the slot's kind, which says by its fields alone what it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from kvjax.cache.eviction.scorers import Scorer
from kvjax.errors import KvjaxError


def check_component_type(slot: str, value: Any, kind: Any) -> None:
    """Raises KvjaxError unless a value is of a slot's kind, a class or a union of classes."""
    if isinstance(value, type):
        raise KvjaxError(f"{slot} is the class {value.__name__}, and must be a value of it, as {value.__name__}(...)")
    if isinstance(value, kind):
        return
    if isinstance(value, Scorer):
        name = type(value).__name__
        raise KvjaxError(
            f"{slot} is a scorer; kvjax.method_api.make_selection({name}(...), budget) makes a selection of it"
        )
    wanted = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
    raise KvjaxError(f"{slot} must be a {wanted}, got {value!r:.80}")


def check_hashable(slot: str, value: Any) -> None:
    """Raises KvjaxError that names what in a value has no hash, by which compiled programs are found again."""
    for where, part in _parts(slot, value):
        if type(part).__hash__ is not None:
            continue
        if dataclasses.is_dataclass(part):
            raise KvjaxError(f"{where} is a {type(part).__name__}, which must be a @dataclasses.dataclass(frozen=True)")
        raise KvjaxError(
            f"{where} is a {type(part).__name__}, which has no hash: a tuple has one; arrays go into a table, or are "
            "made where they are used"
        )


def uncompared_fields(slot: str, value: Any) -> Iterator[str]:
    """The fields in a value by which it is not compared, of classes that are not kvjax's own."""
    for where, part in _parts(slot, value):
        if dataclasses.is_dataclass(part) and type(part).__module__.partition(".")[0] != "kvjax":
            yield from (f"{where}.{field.name}" for field in dataclasses.fields(part) if not field.compare)


def _parts(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value and what its fields and tuples hold, innermost first, each with the way to it."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.compare:
                yield from _parts(f"{where}.{field.name}", getattr(value, field.name, None))
    if isinstance(value, tuple) and type(value) is tuple:
        for i, x in enumerate(value):
            yield from _parts(f"{where}[{i}]", x)
    yield where, value
