"""Method strings, parsed here and nowhere else: `kcache:n=64,device_layers=1`, `offload + kcache`."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from kvjax.cache import compose as slots
from kvjax.cache.method import Method
from kvjax.cache.protocol import KVMethod
from kvjax.errors import ComponentConflict, KvjaxError
from kvjax.methods.registry import (
    MethodEntry,
    describe_unknown_parameter,
    describe_wrong_type,
    is_builtin,
    load_all,
    nearest,
)

Methods = str | KVMethod | Sequence[str | KVMethod]
"""One method or several: values, strings, or strings separated by `;`."""


class Part(NamedTuple):
    """A recipe as a method's string names it, with its parameters."""

    name: str
    values: dict[str, Any]


def parse(text: str) -> Method:
    """A method from its string; `+` composes. Raises KvjaxError with the nearest valid name."""
    return compose(*(load_all()[name].make(**given) for name, given in _calls(text)))


def compose(first: str | KVMethod, *others: str | KVMethod) -> Method:
    """A method that fills the slots of all of these, values or strings, from left to right.

    Raises IncompatibleMethod when two fill the same slot differently. A codec and a placement combine, in any order.
    """
    return cast(Method, functools.reduce(_compose_two, map(method_of, (first, *others))))


def _compose_two(a: KVMethod, b: KVMethod) -> Method:
    try:
        return slots.compose(a, b)
    except ComponentConflict as e:
        if not (remedy := _with_equal_heads(a, b)):
            raise
        raise ComponentConflict(
            e.component,
            f"{name_of(a)} and {name_of(b)} both fill the slot `{e.component}`; use {remedy!r}, which leaves it to one",
        ) from None


def _with_equal_heads(a: KVMethod, b: KVMethod) -> str:
    """The string of both in which those with a parameter `level` leave heads equal; nothing where it is no method."""
    try:
        given = [part for method in (a, b) for part in parse_parts(name_of(method))]
        equal = [
            part._replace(values=part.values | {"level": "head"})
            if "level" in load_all()[part.name].parameters
            else part
            for part in given
        ]
        text = format_methods(equal)
        if equal != given and parse(text):
            return text
    except KvjaxError:  # one of them is no recipe, or there is another clash
        pass
    return ""


def split_methods(method: str | KVMethod) -> tuple[Part, ...]:
    """The recipes that a method is composed of, each with all of its parameters, those left out at their default.

    None for a method of one's own, which no string makes.
    """
    try:
        given = parse_parts(method if isinstance(method, str) else name_of(method))
    except KvjaxError:
        return ()
    return tuple(Part(part.name, _defaults(load_all()[part.name]) | part.values) for part in given)


def is_builtin_method(text: str) -> bool:
    """Whether a name is a string of kvjax's own methods alone, which makes the same method everywhere."""
    parts = split_methods(text)
    return parts != () and all(is_builtin(load_all()[part.name].make) for part in parts)


def parse_parts(text: str) -> tuple[Part, ...]:
    """The recipes that a string names, with the parameters that it gives and no others; raises as `parse` does."""
    return tuple(Part(name, given) for name, given in _calls(text))


def format_methods(parts: Iterable[Part]) -> str:
    """The string that names these recipes with these parameters: what `parse_parts` takes apart."""

    def written(part: Part) -> str:
        given = ",".join(f"{key}={value}" for key, value in part.values.items())
        return f"{part.name}:{given}" if given else part.name

    return " + ".join(map(written, parts))


def split_list(text: str) -> list[str]:
    """The strings of methods that `;` separates."""
    parts = [p.strip() for p in text.split(";") if p.strip()]
    if not parts:
        raise KvjaxError(f"no method in {text!r}; for example: 'full; kcache:n=64'")
    return parts


def resolve(methods: Methods) -> dict[str, KVMethod]:
    """Methods by the names that reports give them, each once: strings as they were written, values by `name_of`."""
    found: dict[str, KVMethod] = {}
    several = [methods] if isinstance(methods, str) or not isinstance(methods, Iterable) else methods
    for one in cast(Sequence[str | KVMethod], several):
        if isinstance(one, str):
            found |= {text: parse(text) for text in split_list(one)}
        else:
            name, method = name_of(one), method_of(one)
            if found.get(name, method) != method:
                raise KvjaxError(
                    f"two different methods are both called {name!r:.200}; make them by recipes of two names"
                )
            found[name] = method
    return found


def method_of(method: str | KVMethod | None) -> KVMethod:
    """A method from its value or its string; raises KvjaxError for anything else."""
    if isinstance(method, str):
        return parse(method)
    if isinstance(method, KVMethod) and not isinstance(method, type):
        return method
    name = getattr(method, "__name__", None)
    if callable(method) and name in load_all():
        raise KvjaxError(
            f"{name} is a recipe, not a method yet: call it, as in kvjax.methods.{name}(), or write '{name}'"
        )
    raise KvjaxError(
        f"a method is a value such as kvjax.methods.kcache(n=64) or a string such as 'kcache:n=64', got {method!r}"
    )


def name_of(method: str | KVMethod) -> str:
    """How reports call a method: the string that makes it, or, for a value of one's own, what it consists of.

    It is derived from the value: a method that was changed after a recipe made it is called by its slots.
    """
    method = method_of(method)
    if not isinstance(method, Method):
        return repr(method)
    if method.recipe and parse(method.recipe) == method:
        return method.recipe
    return "full" if method == Method() else repr(method)


def _calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The recipes that a string names, in order, with the parameters that it gives."""
    parts = text.split("+")
    if any(map(CALL.match, parts)):
        written = [_as_string(part) if CALL.match(part) else part.strip() for part in parts]
        example = "snapkv:budget=1024, for example, or snapkv:budget=1024,window=16"
        remedy = example if None in written else repr(" + ".join(cast(list[str], written)))
        raise KvjaxError(f"a method as a string is no call; write {remedy} for {text.strip()!r:.200}")
    return [_call(part) for part in parts]


CALL = re.compile(r"\s*[\w.]+\s*\(")
"""How a call of Python begins, as in "snapkv(budget=64)"."""


def _as_string(call: str) -> str | None:
    """The method's string that says what a call of a recipe in Python says; None where none does.

    Raises KvjaxError for a recipe that nobody knows.
    """
    recipe = find_entry(call.partition("(")[0].strip().rpartition(".")[2])
    known = list(recipe.parameters)
    try:
        found = cast(ast.Call, ast.parse(call.strip(), mode="eval").body)
        values = [ast.literal_eval(x) for x in found.args]
        resolve = {str(x.arg): ast.literal_eval(x.value) for x in found.keywords}
    except (SyntaxError, ValueError, AttributeError):  # cut short, no literal, or more than a call
        return None
    if len(values) > len(known):
        return None
    return format_methods([Part(recipe.name, dict(zip(known, values, strict=False)) | resolve)])


def find_entry(name: str) -> MethodEntry:
    """The recipe of a name; raises KvjaxError with the nearest name, and how a method of one's own becomes known."""
    recipes = load_all()
    if name in recipes:
        return recipes[name]
    _check_no_path(name)
    close = nearest(name, recipes) or ";"
    raise KvjaxError(
        f"unknown method {name!r}{close} `kvjax methods` lists them all, and one of your own is "
        "known after --load FILE (in Python kvjax.method_api.load_methods(FILE)), or if an installed package has it as "
        "an entry point of the group kvjax.methods"
    )


def _call(text: str) -> tuple[str, dict[str, Any]]:
    name, _, arguments = text.partition(":")
    recipe = find_entry(name.strip())
    given: dict[str, Any] = {}
    for part in arguments.split(","):
        if part.strip():
            key, value = _argument(recipe, part)
            if key in given:
                raise KvjaxError(f"parameter {key!r} of {recipe.name} is given twice; leave one of them out")
            given[key] = value
    return recipe.name, given


def _defaults(recipe: MethodEntry) -> dict[str, Any]:
    return {name: p.default for name, p in recipe.parameters.items() if p.default is not p.empty}


def _argument(recipe: MethodEntry, text: str) -> tuple[str, Any]:
    key, equals, value = (x.strip() for x in text.partition("="))
    known = recipe.parameters
    if key not in known:
        _check_no_path(key)
        raise KvjaxError(describe_unknown_parameter(recipe.name, key, list(known)))
    if not equals or not value:
        raise KvjaxError(f"parameter {key!r} of {recipe.name} needs a value, as in {key}={known[key].default}")
    return key, _value(recipe.name, known[key], value)


def _check_no_path(text: str) -> None:
    """Raises KvjaxError where a method or parameter is looked for in a piece of a path."""
    if "/" in text:
        raise KvjaxError(
            f"{text!r:.80} seems to be the end of a path, and a path in a method's string has no `+`, `,` or `;`: "
            "rename it, or call the recipe in Python, as kvjax.methods.cskv(table=...)"
        )


def _value(recipe: str, parameter: inspect.Parameter, text: str) -> Any:
    want = parameter.annotation
    booleans = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return booleans[text.lower()] if want is bool else want(text)
    except KvjaxError as e:
        raise KvjaxError(f"parameter {parameter.name!r} of {recipe}: {e}") from None
    except (ValueError, KeyError):
        raise KvjaxError(describe_wrong_type(recipe, parameter, text)) from None
