"""The registry of methods: every file of `kvjax/methods/` registers its own, and users register theirs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast, overload

from kvjax.cache.eviction.budgets import TokenBudget, parse_budget
from kvjax.cache.eviction.selection import make_selection
from kvjax.errors import KvjaxError, UnknownKeyword
from kvjax.registry.docstrings import MethodDocs, describe_gap, parse_docstring
from kvjax.utils.arguments import suggest_name
from kvjax.utils.parameter_types import WrongValue, base_type, check_value


class Part(NamedTuple):
    """One registered method in a string, with its parameters."""

    name: str
    values: dict[str, Any]

    def __str__(self) -> str:
        values = ",".join(f"{key}={value}" for key, value in self.values.items())
        return f"{self.name}:{values}" if values else self.name


@dataclasses.dataclass(frozen=True)
class MethodEntry:
    """A registered method.

    Args:
      name: its name in method strings.
      make: the function that makes it from its parameters.
      docs: the parts of the function's docstring.
      example: the string with which its page measures it, on contexts of 2,048 tokens.
      family: one of `FAMILIES`, or `OWN_FAMILY`.
      sized_by: the parameters, separated by commas, that say how much it stores; "" for `budget` or `bits`.
    """

    name: str
    make: Callable[..., Any]
    docs: MethodDocs
    example: str
    family: str
    sized_by: str

    @functools.cached_property  # every part of every string asks for it
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters with types and defaults; a range or a choice is left out of a type."""
        parameters = inspect.signature(self.make, eval_str=True).parameters
        return {name: p.replace(annotation=base_type(p.annotation)) for name, p in parameters.items()}

    @property
    def defaults(self) -> dict[str, Any]:
        """The values of the parameters that may be left out."""
        return {name: p.default for name, p in self.parameters.items() if p.default is not p.empty}

    @property
    def size_parameters(self) -> tuple[str, ...]:
        """The parameters that say how many tokens it stores, or in how many bits; none for a method of one size."""
        default = next((name for name in ("budget", "bits") if name in self.parameters), "")
        return tuple(filter(None, (self.sized_by or default).split(",")))

    @property
    def meanings(self) -> dict[str, str]:
        """The meaning of each parameter in a sentence; "" for one that a user's docstring does not describe.

        Raises:
          KvjaxError: the docstring refers by `as in` to a method that does not describe the parameter.
        """
        meanings = {name: _resolve_meaning(name, self.docs) for name in self.parameters}
        return {name: text and text[0].upper() + text[1:].rstrip(".") + "." for name, text in meanings.items()}


FAMILIES = {
    "exact": "All tokens are stored and read exactly.",
    "quantization by token": "All tokens are stored in fewer bits; each token's key or value has a scale of its own.",
    "quantization by channel and group": "All tokens are stored in fewer bits; channels or groups of tokens share "
    "scales, and outliers, the newest or the important tokens get more bits.",
    "fewer numbers per vector": "All tokens are stored, in fewer channels, in low rank, or shared among heads or "
    "layers.",
    "host memory": "Values, or keys and values, lie in host memory, and a query fetches the tokens that count.",
    "sparse reading": "All tokens stay on the device, and a query reads only some of them.",
    "eviction after the prompt": "Tokens are selected once, at the end of the prompt; the others are evicted.",
    "heads of unequal length": "Some heads keep many tokens and the others few.",
    "merging": "Evicted tokens are merged into kept ones.",
    "eviction at every step": "Tokens are evicted while the answer is decoded, in constant memory.",
    "component over a selection": "The method refines one that selects tokens: write `snapkv + kvcrush`.",
}
"""The families of methods, in the order in which lists and menus show them, with what is common to their members."""

OWN_FAMILY = "your own"

P = ParamSpec("P")
M = TypeVar("M")  # a method: `Method`, or a class that implements the protocol itself

BUILTIN_PACKAGE = "kvjax.methods"  # by name: the methods stand above the registry and import it

MAX_NUMBER = 2**30  # the sum of two such numbers, such as a window and a block, still fits 32 bits

REGISTRY: dict[str, MethodEntry] = {}


@overload
def register_method(make: Callable[P, M], /) -> Callable[P, M]: ...


@overload
def register_method(
    *, example: str = "", family: str = OWN_FAMILY, sized_by: str = ""
) -> Callable[[Callable[P, M]], Callable[P, M]]: ...


def register_method(
    make: Callable[P, M] | None = None, /, *, example: str = "", family: str = OWN_FAMILY, sized_by: str = ""
) -> Any:
    """Registers a function that returns a method, under the function's name; its docstring is the method's text.

    The docstring has a summary and may have the sections `Formula:`, `Differs:` (from the paper or its public code),
    `Args:` and `Reference:`. All of them are required of the methods of kvjax, none of a user's own. `Args:` may say
    `as in` another method, or `make_selection`, for a parameter that is described there.

    Args:
      make: the function, where the decorator stands without arguments.
      example: the string with which the method's page measures it, on contexts of 2,048 tokens; default its name.
      family: one of `FAMILIES`; the default is that of users' own methods.
      sized_by: the parameters, separated by commas, that say how much it stores; default `budget` or `bits`.

    Returns:
      The function, which checks its arguments and notes the method's string in the method.

    Raises:
      KvjaxError: the function's name is taken, a parameter has no type, the family is unknown, or the docstring of a
        method of kvjax is incomplete.

    Example:
      >>> @register_method
      ... def recent_only(tokens: int = 64) -> Method:
      ...     '''Keeps the most recent tokens.'''
      ...     return Method(decode=SinksAndRecent(tokens, sinks=0))
    """

    def register(make: Callable[P, M]) -> Callable[P, M]:
        _check_registration(make, family)
        name, signature = make.__name__, inspect.signature(make, eval_str=True)

        @functools.wraps(make)
        def make_and_name(*args: P.args, **kwargs: P.kwargs) -> M:
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError as e:
                # Python only says that a keyword is unexpected; the known one may be near.
                known = list(signature.parameters)
                problem = f"{name}: {e}; it has {', '.join(known) or 'no parameters'}"
                if unknown := [key for key in kwargs if key not in known]:
                    problem = describe_unknown_parameter(name, unknown[0], known)
                raise UnknownKeyword(problem) from None
            for key, value in arguments.items():
                _check_argument(name, signature.parameters[key], value)
            try:
                method = make(*args, **kwargs)
            except WrongValue as e:
                raise _name_parameter(e, name, signature, arguments) from e
            if not hasattr(method, "string"):
                raise KvjaxError(f"{name} must return a method, and returned {method!r:.60}")
            return dataclasses.replace(cast(Any, method), string=str(Part(name, arguments)))

        docs = parse_docstring(make.__doc__ or "")
        REGISTRY[name] = MethodEntry(name, make_and_name, docs, example or name, family, sized_by)
        return make_and_name

    return register if make is None else register(make)


def _resolve_meaning(parameter: str, docs: MethodDocs) -> str:
    """Replaces `as in` another method, or `make_selection`, in a parameter's meaning by what is written there."""
    meaning = docs.args.get(parameter, "")
    if not (referral := re.match(r"as in `(\w+)`", meaning)):
        return meaning
    name = referral[1]
    if name == make_selection.__name__:
        other = parse_docstring(make_selection.__doc__ or "")
    else:
        other = REGISTRY[name].docs if name in REGISTRY else MethodDocs()
    if parameter not in other.args:
        raise KvjaxError(f"`Args:` refers to `{name}` for {parameter}, which is not described there")
    return _resolve_meaning(parameter, other).rstrip(".") + meaning[referral.end() :]


def _check_registration(make: Any, family: str) -> None:
    """Raises KvjaxError for a family, a name, a parameter or a docstring that a method cannot have."""
    problem, parameters = "", inspect.signature(make, eval_str=True).parameters if callable(make) else {}
    untyped = [
        name
        for name, parameter in parameters.items()
        if parameter.annotation is parameter.empty or not isinstance(base_type(parameter.annotation), type)
    ]
    if family not in (*FAMILIES, OWN_FAMILY):
        problem = f"no family {family!r} of methods; leave it out, or take one of {', '.join(FAMILIES)}"
    elif not callable(make):
        problem = f"@register_method takes no source, got {make!r:.60}; write it into the docstring, below `Reference:`"
    elif not (name := make.__name__).isidentifier():
        problem = f"a method is called by its function's name, and {name!r} is no name of one"
    elif untyped:
        example = f"`{untyped[0]}: int = 4`"
        problem = f"parameter {untyped[0]!r} of {name} needs a type that can be made of a text, such as {example}"
    elif is_builtin(make):
        if make.__doc__:  # `python -OO` strips all docstrings
            problem = describe_gap(name, parse_docstring(make.__doc__), parameters)
    elif other := import_builtin_methods().get(name):
        # A notebook's cell has no file and may define its method again; so may an edited file.
        files = [source_file(other.make), source_file(make)]
        if is_builtin(other.make):
            problem = f"kvjax has a method called {name} ({other.docs.reference}); give yours another name"
        elif None not in files and files[0] != files[1]:
            problem = f"two files define a method called {name}: {files[0]} and {files[1]}; rename one of them"
    if problem:
        raise KvjaxError(problem)


def is_builtin(make: Callable[..., Any]) -> bool:
    """Whether a registered function is kvjax's and not a user's."""
    return make.__module__.startswith(f"{BUILTIN_PACKAGE}.")


def source_file(make: Callable[..., Any]) -> Path | None:
    """The file that defines a registered function; None for one of a shell or of a notebook's cell."""
    code = getattr(inspect.unwrap(make), "__code__", None)
    file = code and Path(code.co_filename)
    return file.resolve() if file and file.is_file() else None


def _check_argument(method: str, parameter: inspect.Parameter, value: Any) -> None:
    """Raises KvjaxError for a value that a method's parameter cannot have, or a number that fits no device."""
    name, problem = parameter.name, ""
    try:
        if parameter.annotation is TokenBudget:
            parse_budget(value)
    except KvjaxError as e:
        problem = f"parameter {name!r} of {method}: {e}"
    # Parameters of any type may be numbers: a budget is a number or a text.
    if isinstance(value, numbers.Real) and abs(cast(float, value)) > MAX_NUMBER:
        problem = f"{method}: {name} must be at most {MAX_NUMBER:,}, got {value!r:.60}; use less"
    if problem:
        raise KvjaxError(problem)
    default = None if parameter.default is parameter.empty else parameter.default
    check_value(method, name, parameter.annotation, value, default)


def _name_parameter(
    error: WrongValue, method: str, signature: inspect.Signature, arguments: Mapping[str, Any]
) -> WrongValue:
    """Returns the error about a component's field in the words of the method's string.

    The parameter is the one of the field's name, or else the one that was given the field's value.
    """
    same = [name for name, value in arguments.items() if value == error.value]
    name = error.name if error.name in same or not same else same[0]
    default = signature.parameters[name].default if name in signature.parameters else None
    default = None if default is inspect.Parameter.empty else default
    return WrongValue(method, name, error.must, error.value, default, error.close)


def describe_unknown_parameter(method: str, name: str, known: Sequence[str]) -> str:
    """The error text that names the nearest parameter, and all of them."""
    close = suggest_name(name, known)
    return f"{method} has no parameter {name!r}{f'{close} It' if close else '; it'} has {', '.join(known) or 'none'}"


@functools.cache  # every part of every string comes here, and Python takes a lock for each of a hundred modules
def import_builtin_methods() -> dict[str, MethodEntry]:
    """Imports every file of `kvjax/methods/`, so that it registers its methods, and returns the registry."""
    for name in dir(importlib.import_module(BUILTIN_PACKAGE)):
        importlib.import_module(f"{BUILTIN_PACKAGE}.{name}")
    return REGISTRY
