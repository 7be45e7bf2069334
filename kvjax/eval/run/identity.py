"""What the name of a method stands for, so that a run is not continued with what has changed under one name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import types
from typing import Any

import numpy as np

OURS = "kvjax"


def identity(method: Any) -> str:
    """A digest of a method: its values, the content of its tables, and the code of what is not kvjax's own."""
    return hashlib.sha256(json.dumps(_said(method, set())).encode()).hexdigest()[:16]


def _said(value: Any, seen: set[int]) -> Any:
    """A value in lists and texts, without addresses; seen: ids of what has been described above."""
    if id(value) in seen:
        return "above"
    seen = seen | {id(value)}
    if isinstance(value, type | types.FunctionType):
        return _code(value, seen)
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value) if f.compare}
        return [_code(type(value), seen), {name: _said(x, seen) for name, x in fields.items()}]
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return [_said(x, seen) for x in value]
    if isinstance(value, dict):
        return [[_said(x, seen) for x in pair] for pair in value.items()]
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        return [array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
    if type(value).__repr__ is object.__repr__:  # which would tell an address
        return [_code(type(value), seen), _said(vars(value), seen) if hasattr(value, "__dict__") else ""]
    return _without_addresses(repr(value))


def _code(what: type | types.FunctionType, seen: set[int]) -> Any:
    """The name of a class or function, and, unless it is kvjax's, what it does."""
    module = what.__module__ or ""  # none of what a text was run for
    name = f"{module}.{what.__qualname__}"
    if module.split(".")[0] == OURS:
        return name
    if isinstance(what, types.FunctionType):
        return [name, _function(what, seen)]
    own = {key: getattr(x, "__func__", getattr(x, "fget", x)) for key, x in vars(what).items()}
    functions = {key: _function(x, seen) for key, x in own.items() if isinstance(x, types.FunctionType)}
    values = {key: x for key, x in own.items() if isinstance(x, int | float | str) and not key.startswith("__")}
    bases = [_code(base, seen) for base in what.__bases__ if base is not object]
    return [name, functions, values, bases]


def _function(function: types.FunctionType, seen: set[int]) -> Any:
    """What a function does, and with which values of the function that it was made in."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return [_body(function.__code__, function.__globals__, seen), [_said(x, seen) for x in cells]]


def _body(code: types.CodeType, known: dict[str, Any], seen: set[int]) -> Any:
    """Instructions and constants of a function, and what it uses of the module in which it was written."""
    constants = [_body(c, known, seen) if isinstance(c, types.CodeType) else _said(c, seen) for c in code.co_consts]
    used = [_said(known[n], seen) for n in code.co_names if _is_of(known.get(n), known.get("__name__"))]
    return [code.co_code.hex(), code.co_names, constants, used]


def _is_of(value: Any, module: str | None) -> bool:
    """Whether a value is a number or a text, or a function or class of the module itself."""
    if isinstance(value, type | types.FunctionType):
        return value.__module__ == module
    return isinstance(value, int | float | str)


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)
