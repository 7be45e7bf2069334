"""Types of parameters with a range or a choice: `Annotated[float, Within("(0, 1]")]`, `Literal["kv", "layer"]`.

A type checker reads a range as its number. `check_fields` checks the fields of a dataclass when it is made (components,
kinds of layers, configurations, options), and the registry the parameters of a method when it is called. Whatever has
`in` and a text may stand where `Within` does.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
import typing
from typing import Annotated, Any, Literal

import numpy as np

from kvjax.errors import KvjaxError
from kvjax.utils.arguments import suggest_name


@dataclasses.dataclass(frozen=True)
class Within:
    """A range of numbers as an interval: `Within("(0, 1]")` is above 0 and at most 1; "inf" is no bound."""

    interval: str

    def __contains__(self, number: Any) -> bool:
        low, high = self._bounds
        above_low = low <= number if self.interval[0] == "[" else low < number
        return above_low and (number <= high if self.interval[-1] == "]" else number < high)

    def __str__(self) -> str:
        low, high = self._bounds
        if high < float("inf"):
            return f"lie in {self.interval}"
        if self.interval[0] == "(":
            return f"be above {low:g}"
        return f"be at least {low:g}" if low else "be 0 or more"

    @property
    def _bounds(self) -> tuple[float, float]:
        low, high = map(float, self.interval[1:-1].split(","))
        return low, high


class OneOf(tuple[float, ...]):
    """Some numbers, as `OneOf((1, 2, 4, 8))`; texts are chosen by `Literal`."""

    def __str__(self) -> str:
        return f"be one of {', '.join(map(str, self))}"


class Odd:
    """The odd numbers from 1, so that neighbors have a center."""

    def __contains__(self, number: int) -> bool:
        return number > 0 and number % 2 == 1

    def __str__(self) -> str:
        return "be odd and at least 1"


PositiveInt = Annotated[int, Within("[1, inf)")]
"""A whole number of 1 or more."""
NonNegativeInt = Annotated[int, Within("[0, inf)")]
"""A whole number of 0 or more."""
PositiveFloat = Annotated[float, Within("(0, inf)")]
"""A number above 0."""
NonNegativeFloat = Annotated[float, Within("[0, inf)")]
"""A number of 0 or more."""
MAX_SIZE = 2**31 - 1
"""The largest size: sizes and positions are 32-bit integers on a device."""
Size = Annotated[int, Within(f"[1, {MAX_SIZE}]")]
"""A whole number from 1 to `MAX_SIZE`."""
UnitFloat = Annotated[float, Within("[0, 1]")]
"""A number from 0 to 1."""


def base_type(annotation: Any) -> Any:
    """The type behind a range or a choice, such as int behind `PositiveInt`."""
    if typing.get_origin(annotation) is Annotated:
        return typing.get_args(annotation)[0]
    return type(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is Literal else annotation


KINDS: dict[Any, tuple[Any, str]] = {
    int: (numbers.Integral, "be a whole number"),
    float: (numbers.Real, "be a number"),
    bool: ((bool, np.bool_), "be true or false"),
    str: ((str, os.PathLike), "be a text"),
}
"""The type of a parameter -> the types of the values that it takes, and what an error asks for."""


class WrongValue(KvjaxError):
    """A value outside the type, range or choice of its field; the registry says whose parameter it is."""

    def __init__(self, owner: str, name: str, must: str, value: Any, default: Any, close: str = ""):
        remedy = close or ("" if default is None else f"; use {default!r}, the default")
        super().__init__(f"{owner}: {name} must {must}, got {value!r:.60}{remedy}")
        self.name, self.must, self.value, self.close = name, must, value, close


def check_value(owner: str, name: str, annotation: Any, value: Any, default: Any = None) -> None:
    """Raises KvjaxError for a value outside the type, range or choice of an annotation; None passes `.. | None`.

    Types other than those of `KINDS`, dataclasses and tuples of these take any value.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if type(None) in args:
        return None if value is None else check_value(owner, name, args[0], value, default)
    if origin is tuple and isinstance(value, tuple):
        for entry in value:
            check_value(owner, f"an entry of {name}", args[0], entry)
        return None
    want = tuple if origin is tuple else base_type(annotation)
    kinds, must = KINDS.get(want, (object, ""))
    if want is tuple or dataclasses.is_dataclass(want):
        kinds, must = want, f"be a {want.__name__}"
    # A bool is an Integral to Python, and NaN is a Real.
    fits = isinstance(value, kinds) and not (want in (int, float) and isinstance(value, bool))
    if origin is Literal:
        fits, must = fits and value in args, f"be one of {', '.join(map(repr, args))}"
    elif origin is Annotated and fits:
        fits, must = value in args[1], str(args[1])
    elif want is float:
        fits = fits and value == value
    if not fits:
        close = suggest_name(value, args) if origin is Literal and isinstance(value, str) else ""
        raise WrongValue(owner, name, must, value, default, close)


def check_fields(value: Any) -> None:
    """Raises KvjaxError for a field of a dataclass outside its type, range or choice.

    A dataclass says `__post_init__ = check_fields`, or calls it first in a `__post_init__` of its own. Numbers and
    texts without a range or a choice are not checked.
    """
    for name, annotation, default in _checked_fields(type(value)):
        check_value(type(value).__name__, name, annotation, getattr(value, name), default)


@functools.cache
def _checked_fields(cls: type) -> tuple[tuple[str, Any, Any], ...]:
    """The fields of a dataclass that `check_fields` checks: name, annotation and default."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:  # a class inside a function may name types that only the function knows
        return ()
    return tuple(
        (field.name, hints[field.name], None if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(cls)
        if any(map(_is_checked, (hints[field.name], *typing.get_args(hints[field.name]))))
    )


def _is_checked(annotation: Any) -> bool:
    is_limited = typing.get_origin(annotation) in (Annotated, Literal)
    return is_limited or annotation is bool or dataclasses.is_dataclass(annotation)
