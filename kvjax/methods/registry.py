"""The register of published methods: each file of this folder adds its own."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import math
import numbers
import os
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

import kvjax.methods
from kvjax.cache.eviction.budgets import TokenBudget, parse_budget
from kvjax.errors import KvjaxError
from kvjax.methods.trial import Trial


@dataclasses.dataclass(frozen=True)
class MethodEntry:
    """A published method: how to make it, and where it comes from."""

    name: str
    make: Callable[..., Any]
    source: str
    trials: tuple[Trial, ...] = ()  # rows of the battery of tests
    formula: str = ""  # what it computes, for its page
    differs: str = ""  # in a sentence, what is not as in the public code or the paper
    example: str = ""  # the string with which its page measures it on contexts of 2,048 tokens; default its name
    sized_by: str = ""  # the parameters, separated by commas, that say how much it holds; default `budget` or `bits`
    family: str = ""  # one of FAMILIES, or OWN_FAMILY

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Its parameters with types and defaults."""
        return dict(inspect.signature(self.make, eval_str=True).parameters)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The parameters that say how many tokens it holds, or in how many bits; none for a method of one size."""
        default = next((name for name in ("budget", "bits") if name in self.parameters), "")
        return tuple(filter(None, (self.sized_by or default).split(",")))

    @property
    def summary(self) -> str:
        """What it does, in one line."""
        return self.text.partition("\n")[0]

    @property
    def text(self) -> str:
        """What its docstring says; nothing where there is none."""
        return inspect.getdoc(self.make) or ""


FAMILIES = {
    "exact": "All tokens are kept and read, exactly.",
    "quantization by token": "All tokens in fewer bits; each token's key or value has a scale of its own.",
    "quantization by channel and group": "All tokens in fewer bits; channels or groups of tokens share scales, "
    "and outliers, the newest or the important tokens keep more.",
    "fewer numbers per vector": "All tokens, in fewer channels, in low rank, or shared among heads or layers.",
    "host memory": "Values, or keys and values, lie in host memory, and a query fetches the tokens that count.",
    "sparse reading": "All tokens stay on the device, and a query reads only some of them.",
    "eviction after the prompt": "Tokens are chosen once, when the prompt has been read; the others are gone.",
    "heads of unequal length": "Some heads keep many tokens and the others few.",
    "merging": "Tokens that leave are folded into those that stay.",
    "eviction at every step": "Tokens leave while the answer is decoded, in constant memory.",
    "component over a selection": "Refines a method that chooses tokens: write `snapkv + kvcrush`.",
}
"""The families of methods, in the order in which lists and menus show them, with what is common to their members."""

OWN_FAMILY = "your own"

P = ParamSpec("P")
M = TypeVar("M")  # a method: `Method`, or what implements the contract itself

LARGEST = 2**30  # the sum of two such numbers, a window behind a block, is still a 32-bit integer

REGISTRY: dict[str, MethodEntry] = {}


def recipe(
    source: str,
    *trials: Trial,
    formula: str = "",
    differs: str = "",
    example: str = "",
    sized_by: str = "",
    family: str = OWN_FAMILY,
) -> Callable[[Callable[P, M]], Callable[P, M]]:
    """Registers a function that returns a method, with its citation, under the function's name; see `MethodEntry`."""
    if not isinstance(source, str):
        raise KvjaxError('a recipe says where its method comes from: @recipe("an idea of mine")')
    if family not in (*FAMILIES, OWN_FAMILY):
        raise KvjaxError(f"no family {family!r} of methods; leave it out, or take one of {', '.join(FAMILIES)}")

    def register(make: Callable[P, M]) -> Callable[P, M]:
        signature = inspect.signature(make, eval_str=True)
        _check_recipe(make, signature)

        @functools.wraps(make)
        def named(*args: P.args, **kwargs: P.kwargs) -> M:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as e:
                raise TypeError(_why_no_call(make.__name__, signature, kwargs, e)) from None
            for key, value in given.items():
                _check_value(make.__name__, signature.parameters[key], value)
            text = ",".join(f"{k}={v}" for k, v in given.items())
            method = make(*args, **kwargs)
            if not hasattr(method, "recipe"):
                raise KvjaxError(f"the recipe {make.__name__} must return a method, and returned {method!r:.60}")
            return dataclasses.replace(cast(Any, method), recipe=make.__name__ + (f":{text}" if text else ""))

        name = make.__name__
        REGISTRY[name] = MethodEntry(name, named, source, trials, formula, differs, example or name, sized_by, family)
        return named

    return register


def _check_recipe(make: Callable[..., Any], signature: inspect.Signature) -> None:
    """Raises KvjaxError for a name or a parameter that no string can have, and for the name of a method of kvjax."""
    name = make.__name__
    if not name.isidentifier():
        raise KvjaxError(f"a recipe is called by its function's name, and {name!r} is no name of one")
    for parameter in signature.parameters.values():
        if not isinstance(parameter.annotation, type) or parameter.annotation is parameter.empty:
            raise KvjaxError(
                f"parameter {parameter.name!r} of {name} needs a type that can be made of a text, such as "
                f"`{parameter.name}: int = 4`"
            )
    if is_builtin(make) or (other := _load_ours().get(name)) is None:
        return
    if is_builtin(other.make):
        raise KvjaxError(f"kvjax has a method called {name} ({other.source}); give yours another name")
    files = [source_file(other.make), source_file(make)]
    if None not in files and files[0] != files[1]:
        raise KvjaxError(f"two files define a method called {name}: {files[0]} and {files[1]}; rename one of them")


def is_builtin(make: Callable[..., Any]) -> bool:
    """Whether a recipe's function is kvjax's and not a user's."""
    return make.__module__.startswith(f"{kvjax.methods.__name__}.")


def source_file(make: Callable[..., Any]) -> Path | None:
    """The file in which a recipe's function stands; None for one of a shell, or of a notebook's cell."""
    code = getattr(inspect.unwrap(make), "__code__", None)
    file = code and Path(code.co_filename)
    return file.resolve() if file and file.is_file() else None


KINDS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real, bool: (bool, np.bool_), str: (str, os.PathLike)}
"""What a call may give for a parameter of these types."""


def _check_value(recipe: str, parameter: inspect.Parameter, value: Any) -> None:
    """Raises KvjaxError for a value of another type than the parameter's, or a number that no device has."""
    want, name = parameter.annotation, f"parameter {parameter.name!r} of {recipe}"
    if want is TokenBudget:
        try:
            parse_budget(value)
        except KvjaxError as e:
            raise KvjaxError(f"{name}: {e}") from None
    elif want in KINDS:
        is_number = want in (int, float)
        if not isinstance(value, KINDS[want]) or (is_number and (isinstance(value, bool) or value != value)):
            raise KvjaxError(describe_wrong_type(recipe, parameter, value))
    if (
        isinstance(value, numbers.Real) and abs(cast(float, value)) > LARGEST
    ):  # also of what is a number or something else
        raise KvjaxError(f"{name} must be at most {LARGEST:,}, got {value!r:.60}; no text is so long")


def describe_wrong_type(recipe: str, parameter: inspect.Parameter, given: Any) -> str:
    """The error that says which type a parameter has, and what to write for a number of another one."""
    want, name = parameter.annotation, parameter.name
    said = f"parameter {name!r} of {recipe} is {want.__name__}, got {given!r:.60} (default {parameter.default!r})"
    if isinstance(given, bool) and want in (int, float):
        return f"{said}; write a {'whole ' if want is int else ''}number"
    try:
        value = float(given) if want in (int, float) else None
    except (TypeError, ValueError, OverflowError):
        value = None
    if value is None or not abs(value) <= LARGEST:
        return said
    if want is float or value == int(value):
        return f"{said}; write {name}={value:.12g}"
    if abs(value) < 1:  # of a share nobody knows how many are meant
        return f"{said}; write a whole number"
    return f"{said}; write {name}={math.floor(value)} or {name}={math.ceil(value)}"


def describe_unknown_parameter(recipe: str, name: str, known: Sequence[str]) -> str:
    """The error that names the parameter that is nearest, and all of them."""
    close = nearest(name, known)
    has = f"has {', '.join(known)}" if known else "has none"
    return f"{recipe} has no parameter {name!r}" + (f"{close} It {has}" if close else f"; it {has}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A question for the name that is nearest to one that nobody knows; nothing where all are far."""
    close = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _why_no_call(recipe: str, signature: inspect.Signature, given: Iterable[str], error: TypeError) -> str:
    """What is wrong with a call, as Python says it, or by the keyword that the recipe has not."""
    known = list(signature.parameters)
    for name in given:
        if name not in known:
            return describe_unknown_parameter(recipe, name, known)
    return f"{recipe}: {error}; it has {', '.join(known) or 'no parameters'}"


def load_all() -> dict[str, MethodEntry]:
    """All recipes: those of kvjax, those of installed packages, and those that the user has defined or loaded."""
    from kvjax.methods.loading import load_entry_points  # which needs this module

    _load_ours()
    load_entry_points()
    return REGISTRY


def _load_ours() -> dict[str, MethodEntry]:
    """Imports every file of this folder, each of which registers its own."""
    for module in pkgutil.iter_modules(kvjax.methods.__path__):
        importlib.import_module(f"kvjax.methods.{module.name}")
    return REGISTRY
