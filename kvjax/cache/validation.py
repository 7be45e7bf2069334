"""Validates a method's components: right type, hashable, determined by their fields."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from kvjax.cache.components import Scorer
from kvjax.errors import KvjaxError


def check_component_type(name: str, value: Any, kind: Any) -> None:
    """Raises KvjaxError unless a component is of its type, a class or a union of classes."""
    if isinstance(value, type):
        problem = f"is the class {value.__name__}, and must be a value of it, as {value.__name__}(...)"
    elif isinstance(value, kind):
        return
    elif isinstance(value, Scorer):
        scorer = type(value).__name__
        problem = f"is a scorer; kvjax.method_api.make_selection({scorer}(...), budget) makes a selection of it"
    else:
        expected = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
        problem = f"must be a {expected}, got {value!r:.80}"
    raise KvjaxError(f"{name} {problem}")


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
            # A subclass without a decorator of its own may set attributes that are no fields.
            known = {field.name for field in dataclasses.fields(part)}
            cached = {
                name for cls in type(part).__mro__ for name, x in vars(cls).items() if isinstance(x, cached_property)
            }
            yield from (f"{path}.{name}" for name in getattr(part, "__dict__", ()) if name not in known | cached)


class Difference(NamedTuple):
    """A part in which two values differ that were made in the same way, in words, and the repair."""

    problem: str
    remedy: str


def find_difference(path: str, one: Any, other: Any) -> Difference | None:
    """Finds the part of a value that differs from its counterpart in a value that was made in the same way.

    Compiled programs are found by equality and hash, so that a method with a part that is equal to itself alone is
    compiled anew each time that its string is used.
    """
    for place, part in _walk(path, one):
        if isinstance(part, float | complex) and part != part:
            return Difference(f"{place} is NaN, which is unequal to itself", "Take another number, or None.")
    if _are_equal(one, other):
        if hash(one) == hash(other):
            return None
        return Difference(f"{path} and its equal have two hashes", f"Leave `__hash__` of {type(one).__name__} out.")
    kind, children = type(one), []
    if type(other) is kind and dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one) if field.compare]
        children = [(f"{path}.{name}", getattr(one, name, None), getattr(other, name, None)) for name in names]
    elif type(other) is kind is tuple and len(one) == len(other):
        children = [(f"{path}[{i}]", x, y) for i, (x, y) in enumerate(zip(one, other, strict=True))]
    for child in children:
        if difference := find_difference(*child):
            return difference
    if isinstance(one, types.FunctionType):
        return Difference(
            f"{path} is the function {one.__qualname__}, made anew with each method, and equal to itself alone",
            "Define it with `def` at the top of the file.",
        )
    if kind is not type(other) or kind.__eq__ is not object.__eq__:
        return Difference(
            f"{path} is {one!r:.60} in a method and {other!r:.60} in the same method made again",
            "Make it of the method's parameters alone.",
        )
    decorator = "@dataclasses.dataclass(frozen=True)"
    return Difference(
        f"{path} is a {kind.__name__} that is equal to itself alone, so that equal strings make unequal methods, and "
        "each is compiled anew",
        f"Write `{decorator}` above `class {kind.__name__}`, without `eq=False`, and make what it holds fields.",
    )


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except ValueError:  # arrays are compared number by number
        return False


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
