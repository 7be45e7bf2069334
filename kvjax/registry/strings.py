"""Method strings such as `kcache:n=64,device_layers=1` and `offload + kcache`; no other file parses them."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import cast

from kvjax.cache import compose as components
from kvjax.cache.method import Method
from kvjax.cache.protocol import KVMethod
from kvjax.errors import KvjaxError
from kvjax.registry.loading import ENTRY_POINT_GROUP, load_all
from kvjax.registry.registration import MethodEntry, Part, describe_unknown_parameter, is_builtin
from kvjax.utils.arguments import BOOLEANS, suggest_name
from kvjax.utils.keywords import checks_keywords

Methods = str | KVMethod | Sequence[str | KVMethod]
"""One method or several: values, strings, or strings separated by `;`."""


@checks_keywords
def parse(text: str) -> Method:
    """Makes a method from its string; `+` composes. Raises KvjaxError with the nearest valid name."""
    return compose(*(load_all()[name].make(**values) for name, values in parse_parts(text)))


@checks_keywords
def compose(first: str | KVMethod, *others: str | KVMethod) -> Method:
    """Composes methods, values or strings, from left to right.

    A codec and a placement combine, in any order.

    Raises:
      IncompatibleMethod: two of them define the same component differently.
    """
    return cast(Method, functools.reduce(components.compose, map(method_of, (first, *others))))


def split_methods(method: str | KVMethod) -> tuple[Part, ...]:
    """The registered methods that a method is composed of, each with all of its parameters.

    Returns:
      The parts, with the defaults of the parameters that are left out; empty for a value that no string makes.
    """
    try:
        parts = parse_parts(method if isinstance(method, str) else name_of(method))
    except KvjaxError:
        return ()
    return tuple(Part(part.name, find_entry(part.name).defaults | part.values) for part in parts)


def is_builtin_method(text: str) -> bool:
    """Whether a name is a string of kvjax's own methods alone, which makes the same method everywhere."""
    parts = split_methods(text)
    return parts != () and all(is_builtin(load_all()[part.name].make) for part in parts)


def parse_parts(text: str) -> tuple[Part, ...]:
    """The registered methods in a string, with the parameters that it gives and no others.

    Raises:
      KvjaxError: an unknown name, with the nearest one, a wrong parameter, or a call or separators of another language.
    """
    if not isinstance(text, str):
        raise KvjaxError(f"a method's string is a text such as 'kcache:n=64', got {text!r:.80}")
    try:
        return _parse_parts(text)
    except KvjaxError as e:
        if problem := _describe_separators(text):
            raise KvjaxError(problem) from e
        raise


def _describe_separators(text: str) -> str:
    """The error text for a string of known methods with other separators, or of several methods; "" for another."""
    written, known = "", load_all()
    # NFKC, since input methods of East Asian scripts write the separators in full width.
    for word in re.findall(r"\+|[^\s+:;,|&]+", unicodedata.normalize("NFKC", text)):
        begins, has_parameters = not written or written.endswith("+ "), ":" in re.split(r"[;+]", written)[-1]
        if word == "+" and not begins:
            written += " + "
        elif word in known:
            written += word if begins else f"; {word}"
        elif "=" in word.strip("=") and not begins:
            written += f"{',' if has_parameters else ':'}{word}"
        else:
            return ""
    # Spaces, and separators at an end, change nothing.
    said, meant = (re.sub(r"\s|[:,]+(?=\s*([+;]|$))", "", x) for x in (text, written))
    if written and said != meant:
        return (
            f"{text!r:.200} is no method: `;` separates methods, `+` composes them, `:` begins a method's parameters "
            f"and `,` separates these; write {written!r:.200}"
        )
    if ";" in written:
        return f"{text!r:.200} are several methods, and one is asked for; give one of them, or compose them by `+`"
    return ""


def _parse_parts(text: str) -> tuple[Part, ...]:
    parts, pieces = [], text.split("+")
    for i, part in enumerate(pieces, 1):
        name, _, arguments = part.partition(":")
        if not re.search(r"\w", name):
            others = " + ".join(piece.strip() for piece in pieces if re.search(r"\w", piece))
            problem = f"part {i} of {text!r:.200} names no method, and one stands on each side of a `+`"
            if len(pieces) == 1:
                problem = f"no method in {text!r:.200}"
            raise KvjaxError(f"{problem}; write {others if others and others != text else 'snapkv:budget=256'!r:.200}")
        entry = find_entry(name.strip())
        known, defaults, values, before = entry.parameters, entry.defaults, {}, ""
        for argument in filter(str.strip, arguments.split(",")):
            key, _, value = (x.strip() for x in argument.partition("="))
            where, problem = f"parameter {key!r} of {entry.name}", ""
            if key not in known:
                path = _describe_cut_path(key if "=" in argument else f"{before},{key}")
                problem = path or describe_unknown_parameter(entry.name, key, list(known))
            elif not value:
                problem = f"{where} needs a value, as in {key}={defaults.get(key, '..')}"
            elif key in values:
                problem = f"{where} is given twice; leave one of them out"
            else:
                want = known[key].annotation
                try:
                    values[key] = BOOLEANS[value.lower()] if want is bool else want(value)
                except KvjaxError as e:
                    problem = f"{where}: {e}"
                except (ValueError, KeyError):
                    default = f" (default {defaults[key]!r})" if key in defaults else ""
                    problem = f"{where} is {want.__name__}, got {value!r:.60}{default}"
            if problem:
                raise KvjaxError(problem)
            before = argument
        parts.append(Part(entry.name, values))
    return tuple(parts)


def format_methods(parts: Iterable[Part]) -> str:
    """The string of these parts, the inverse of `parse_parts`."""
    return " + ".join(map(str, parts))


def split_list(text: str) -> list[str]:
    """The method strings that `;` separates."""
    strings = [part.strip() for part in text.split(";") if part.strip()]
    if not strings:
        raise KvjaxError(f"no method in {text!r}; for example: 'full; kcache:n=64'")
    return strings


def resolve(methods: Methods) -> dict[str, KVMethod]:
    """Methods by the names that reports give them, each once: strings as written, values by `name_of`."""
    resolved: dict[str, KVMethod] = {}
    several = [methods] if isinstance(methods, str) or not isinstance(methods, Iterable) else methods
    for each in cast(Sequence[str | KVMethod], several):
        if isinstance(each, str):
            resolved |= {text: parse(text) for text in split_list(each)}
        else:
            name, method = name_of(each), method_of(each)
            if resolved.get(name, method) != method:
                raise KvjaxError(f"two different methods are both called {name!r:.200}; register them under two names")
            resolved[name] = method
    return resolved


def method_of(method: str | KVMethod | None) -> KVMethod:
    """A method from its value or its string; raises KvjaxError for anything else."""
    if isinstance(method, str):
        return parse(method)
    if isinstance(method, KVMethod) and not isinstance(method, type):
        return method
    problem = (
        f"a method is a value such as kvjax.methods.kcache(n=64) or a string such as 'kcache:n=64', got {method!r}"
    )
    if callable(method) and (name := getattr(method, "__name__", None)) in load_all():
        problem = f"{name} is a function that makes a method: call it, as in kvjax.methods.{name}(), or write '{name}'"
    raise KvjaxError(problem)


@checks_keywords
def name_of(method: str | KVMethod) -> str:
    """The name of a method in reports: the string that makes it, or the `repr` of a value that none makes.

    It is derived from the value, so a method whose components were replaced does not keep its old string.
    """
    method = method_of(method)
    if not isinstance(method, Method):
        return repr(method)
    if method.string and parse(method.string) == method:
        return method.string
    return "full" if method == Method() else repr(method)


def find_entry(name: str) -> MethodEntry:
    """The registered method of a name; raises KvjaxError with the nearest name, and how to load one's own method."""
    entries = load_all()
    if name in entries:
        return entries[name]
    if "(" in name:
        called = find_entry(name.partition("(")[0].strip().rpartition(".")[2])
        problem = f"a method as a string is no call; write {name!r:.200} as in {called.example!r}"
    else:
        several = ", `;` separates several" if re.search(r"[\s,|&]", name) else ""
        problem = _describe_cut_path(name) or (
            f"unknown method {name!r}{suggest_name(name, entries) or ';'} `kvjax methods` lists them all{several}, and "
            "one of your own is known after --load FILE (in Python kvjax.method_api.load_methods(FILE)), or if an "
            f"installed package has it as an entry point of the group {ENTRY_POINT_GROUP}"
        )
    raise KvjaxError(problem)


def _describe_cut_path(text: str) -> str:
    """The error text for an unknown name that is a piece of a path, cut at `+`, `,` or `;`; "" for another name."""
    if "/" not in text:
        return ""
    return (
        f"{text!r:.80} seems to be the end of a path, and a path in a method's string has no `+`, `,` or `;`: "
        "rename it, or call the method's function in Python, as kvjax.methods.cskv(table=...)"
    )
