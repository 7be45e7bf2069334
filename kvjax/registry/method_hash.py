"""A method's hash, by which a run notices that the method of a name has changed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import re
import sys
from typing import Any

import kvjax


def method_hash(method: Any) -> str:
    """A digest of kvjax's version, a method's values, and the source of the classes that are not kvjax's own.

    A table counts by its content. The hash does not see functions and variables that a user's class calls, nor, below
    Python 3.13, the source of a class in a notebook, which is in no file.
    """
    return hashlib.sha256(f"kvjax {kvjax.__version__}, {_describe(method)}".encode()).hexdigest()[:16]


def has_user_code(method: Any) -> bool:
    """Whether any component of a method is of a class that is not kvjax's."""
    if type(method) is tuple:
        return any(map(has_user_code, method))
    if not dataclasses.is_dataclass(method):
        return False
    values = (getattr(method, f.name, None) for f in dataclasses.fields(method))
    return type(method).__module__.partition(".")[0] != "kvjax" or any(map(has_user_code, values))


def _describe(value: Any) -> str:
    """The `repr` of the fields that count, with a table's digest for its path and without a method's string."""
    if type(value) is tuple:
        return f"({', '.join(map(_describe, value))})"
    if not dataclasses.is_dataclass(value):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # a function's address differs between processes
    is_users = type(value).__module__.partition(".")[0] != "kvjax"
    # kvjax excludes from comparison what changes no result; a user's class may do so for what does.
    names = [
        field.name
        for field in dataclasses.fields(value)
        if (field.compare or is_users)
        # A field that older records know nothing of counts once it says something else.
        and (field.metadata.get("hash_default", True) or getattr(value, field.name) != field.default)
    ]
    fields = ", ".join(f"{name}={_describe(getattr(value, name, None))}" for name in names)
    return f"{type(value).__qualname__}({fields}){_class_source(type(value)) if is_users else ''}"


@functools.cache  # the source as it was when the class was first hashed, though its file may be edited since
def _class_source(cls: type) -> str:
    """The source of a class and of its bases, except kvjax's and Python's."""
    sources = []
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("kvjax", *sys.stdlib_module_names):
            continue
        try:
            sources.append(inspect.getsource(base))
        except (OSError, TypeError):  # its source is in no file
            sources.append(base.__qualname__)
    return "".join(sources)
