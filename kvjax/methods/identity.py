"""What the name of a method stands for, so that a run is not continued with what has changed under one name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.core import compile_cache

OURS = "kvjax"
INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_SEEN: dict[Any, str] = {}


def identity_now(method: Any) -> str:
    """The identity of a method; where an equal one had another, what was compiled for that is forgotten.

    A compiled program holds what a module's variables were when it was made.
    """
    now = identity(method)
    if _SEEN.setdefault(method, now) != now:
        compile_cache.clear_compiled()
        _SEEN[method] = now
    return now


def identity(method: Any) -> str:
    """A digest of a method: its values, the content of its tables, and the code of what is not kvjax's own."""
    return hashlib.sha256(json.dumps(_said(method, set())).encode()).hexdigest()[:16]


def is_ones_own(method: Any) -> bool:
    """Whether any part of a method is of a class that is not kvjax's."""
    if type(method) is tuple:
        return any(map(is_ones_own, method))
    if not dataclasses.is_dataclass(method):
        return False
    parts = (getattr(method, f.name, None) for f in dataclasses.fields(method))
    return not _is_kvjaxs(type(method).__module__) or any(map(is_ones_own, parts))


def _said(value: Any, seen: set[int]) -> Any:
    """A value in lists and texts, without addresses; seen: ids of what has been described above."""
    if id(value) in seen:
        return "above"
    seen = seen | {id(value)}
    if isinstance(value, type | types.FunctionType):
        return _code(value, seen)
    if isinstance(value, types.ModuleType):
        file = getattr(value, "__file__", None)
        return [value.__name__, hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""]
    if dataclasses.is_dataclass(value):
        told = [f.name for f in dataclasses.fields(value) if f.compare or not _is_kvjaxs(type(value).__module__)]
        return [_code(type(value), seen), {name: _said(getattr(value, name, None), seen) for name in told}]
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
    name = f"{what.__module__ or ''}.{what.__qualname__}"  # no module where a text was run
    if _is_kvjaxs(what.__module__):
        return name
    if isinstance(what, types.FunctionType):
        return [name, _function(what, seen)]
    own = {key: getattr(x, "__func__", getattr(x, "fget", x)) for key, x in vars(what).items()}
    functions = {key: _function(x, seen) for key, x in own.items() if isinstance(x, types.FunctionType)}
    values = {key: _said(x, seen) for key, x in own.items() if _is_data(x) and not key.startswith("__")}
    bases = [_code(base, seen) for base in what.__bases__ if base is not object]
    return [name, functions, values, bases]


def _function(function: types.FunctionType, seen: set[int]) -> Any:
    """What a function does, and with which values of the function that it was made in."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return [_body(function.__code__, function.__globals__, seen), [_said(x, seen) for x in cells]]


def _body(code: types.CodeType, known: dict[str, Any], seen: set[int]) -> Any:
    """Instructions and constants of a function, and what it uses of the module in which it was written."""
    constants = [_body(c, known, seen) if isinstance(c, types.CodeType) else _said(c, seen) for c in code.co_consts]
    used = [_said(known[n], seen) for n in code.co_names if _is_told(known.get(n))]
    return [code.co_code.hex(), code.co_names, constants, used]


def _is_told(value: Any) -> bool:
    """Whether a value is data, or a module, function or class that is neither kvjax's nor installed."""
    if isinstance(value, types.ModuleType):
        return not _is_installed(value.__name__)
    if isinstance(value, type | types.FunctionType):
        return not _is_installed(value.__module__)
    return _is_data(value)


def _is_data(value: Any) -> bool:
    plain = isinstance(value, int | float | str | bytes | list | tuple | dict | set | frozenset)
    return plain or (hasattr(value, "__array__") and not isinstance(value, type))


def _is_kvjaxs(module: str | None) -> bool:
    return (module or "").partition(".")[0] == OURS


def _is_installed(module: str | None) -> bool:
    """Whether a module is kvjax's, built in, or of an installed package; a script or notebook is not."""
    if not module or module == "__main__":
        return False
    if _is_kvjaxs(module) or module in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(INSTALLED)


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)
