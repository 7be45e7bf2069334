"""Static fields of pytrees as JSON and back, so that `jax.export` can write programs that take or return them.

A file that somebody else wrote names classes, and so it decides what is called. Nothing is imported by name, and only
values are made: tuples, numbers, texts, and frozen dataclasses and named tuples whose module is imported already. This
is why pickle is not used.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from typing import Any

from kvjax.errors import KvjaxError
from kvjax.utils import json_documents


def dumps(value: Any) -> bytes:
    """Writes what `loads` reads; raises KvjaxError for a value that is neither plain nor made of plain fields."""
    return json.dumps(_to_json(value)).encode()


def loads(content: bytes) -> Any:
    """Reads what `dumps` wrote; raises KvjaxError for anything else, and for a class that is not imported."""
    try:
        return _from_json(json_documents.loads(content))
    except KvjaxError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as e:
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
    # What a class computes itself it computes again.
    names = [f.name for f in dataclasses.fields(cls) if f.init] if dataclasses.is_dataclass(cls) else cls._fields
    fields = {name: _to_json(getattr(value, name)) for name in names}
    return {"module": cls.__module__, "class": cls.__qualname__, "fields": fields}


def _from_json(said: Any) -> Any:
    if isinstance(said, list):
        return tuple(_from_json(x) for x in said)
    if not isinstance(said, dict):
        return said
    name = f"{said['module']}.{said['class']}"
    module = sys.modules.get(said["module"])
    if module is None:
        raise KvjaxError(
            f"{name} is needed to read this program, and its module is not imported; import it first, or load the file "
            "of a method with kvjax.method_api.load_methods"
        )
    cls = functools.reduce(getattr, said["class"].split("."), module)
    if not isinstance(cls, type) or not _is_value_class(cls):
        raise KvjaxError(f"{name} is neither a frozen dataclass nor a named tuple; export the program again")
    return cls(**{key: _from_json(x) for key, x in said["fields"].items()})


def _is_value_class(cls: type) -> bool:
    """Whether objects of a class are values that their fields make up."""
    if dataclasses.is_dataclass(cls):
        return cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return issubclass(cls, tuple) and hasattr(cls, "_fields")
