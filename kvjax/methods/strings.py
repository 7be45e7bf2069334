"""Method strings, parsed here and nowhere else: `kcache:n=64,device_layers=1`, `offload + kcache`."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable
from typing import Any

from kvjax.cache.compose import compose
from kvjax.cache.method import Method
from kvjax.core.types import KvjaxError
from kvjax.methods.zoo import RECIPES, Recipe


def parse(text: str) -> Method:
    """A method from its string; `+` composes. Raises KvjaxError with the nearest valid name."""
    return functools.reduce(compose, [_one(part.strip()) for part in text.split("+")])


def parse_many(text: str) -> list[Method]:
    """Methods from strings separated by `;`."""
    parts = [p.strip() for p in text.split(";") if p.strip()]
    if not parts:
        raise KvjaxError(f"no method in {text!r}; for example: 'full; kcache:n=64'")
    return [parse(p) for p in parts]


def _one(text: str) -> Method:
    name, _, arguments = text.partition(":")
    name = name.strip()
    if name not in RECIPES:
        raise KvjaxError(f"unknown method {name!r}{_nearest(name, RECIPES)}; `kvjax methods` lists them all")
    recipe = RECIPES[name]
    pairs = [a for a in arguments.split(",") if a.strip()]
    return recipe.make(**dict(_argument(recipe, a) for a in pairs))


def _argument(recipe: Recipe, text: str) -> tuple[str, Any]:
    key, equals, value = (x.strip() for x in text.partition("="))
    known = recipe.parameters
    if key not in known:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise KvjaxError(f"{recipe.name} has no parameter {key!r}{_nearest(key, known)}; {has}")
    if not equals or not value:
        raise KvjaxError(f"parameter {key!r} of {recipe.name} needs a value, as in {key}={known[key].default}")
    return key, _value(recipe.name, known[key], value)


def _value(recipe: str, parameter: inspect.Parameter, text: str) -> Any:
    want = parameter.annotation
    booleans = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return booleans[text.lower()] if want is bool else want(text)
    except (ValueError, KeyError):
        raise KvjaxError(
            f"parameter {parameter.name!r} of {recipe} is {want.__name__}, got {text!r} (default {parameter.default})"
        ) from None


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
