"""Static fields of pytrees as JSON, so that `jax.export` can write programs that take or return them.

An exported program may come from somebody else, and it names the classes to build. So this is no pickle: nothing is
imported by name, and only values are built (numbers, strings, tuples, and frozen dataclasses and named tuples of
modules that are imported already).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from typing import Any

from kvjax.errors import KvjaxError


def dumps(value: Any) -> bytes:
    """Writes a value for `loads`; raises KvjaxError for one that is not made of plain fields."""
    return json.dumps(_to_json(value)).encode()


def loads(content: bytes) -> Any:
    """Reads what `dumps` wrote; raises KvjaxError for anything else, and for a class that is not imported."""
    try:
        return _from_json(json.loads(content))
    except KvjaxError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise KvjaxError(f"these are no static fields that this version of kvjax wrote ({e}); export it again") from e


def _to_json(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return [_to_json(x) for x in value]
    cls = type(value)
    if not _is_value_class(cls):
        raise KvjaxError(
            f"{value!r:.80} is a static field of what is exported, and {cls.__name__} is neither a number, a text, a "
            "tuple, a frozen dataclass nor a named tuple; make it one of these"
        )
    # A field with init=False is computed by the class itself, also when it is read back.
    names = [f.name for f in dataclasses.fields(cls) if f.init] if dataclasses.is_dataclass(cls) else cls._fields
    # By name, not by place: a later version may reorder fields, and one that it lacks is then an error.
    fields = {name: _to_json(getattr(value, name)) for name in names}
    return {"module": cls.__module__, "class": cls.__qualname__, "fields": fields}


def _from_json(raw: Any) -> Any:
    if isinstance(raw, list):
        return tuple(_from_json(x) for x in raw)
    if not isinstance(raw, dict):
        return raw
    name = f"{raw['module']}.{raw['class']}"
    module = sys.modules.get(raw["module"])
    if module is None:
        raise KvjaxError(
            f"{name} is needed to read this program, and its module is not imported; import it first, or load the file "
            "of a method with kvjax.method_api.load_methods"
        )
    cls = functools.reduce(getattr, raw["class"].split("."), module)
    # Only value classes are called. Any other callable of an imported module, `os.system` among them, would run here.
    if not isinstance(cls, type) or not _is_value_class(cls):
        raise KvjaxError(f"{name} is neither a frozen dataclass nor a named tuple; export the program again")
    return cls(**{key: _from_json(x) for key, x in raw["fields"].items()})


def _is_value_class(cls: type) -> bool:
    """Whether the fields of an object determine it."""
    if dataclasses.is_dataclass(cls):
        return cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return issubclass(cls, tuple) and hasattr(cls, "_fields")
