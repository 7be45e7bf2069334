"""What the name of a method stands for, so that a run is not continued with what has changed under one name."""

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
    """A digest of kvjax's version, a method's values, and the text of the classes that are not kvjax's own.

    A table counts by its content. Not seen are functions and variables that a class of one's own uses, and, below
    Python 3.13, a class that is written in a notebook: its text is in no file.
    """
    return hashlib.sha256(f"kvjax {kvjax.__version__}, {_described(method)}".encode()).hexdigest()[:16]


def has_user_code(method: Any) -> bool:
    """Whether any part of a method is of a class that is not kvjax's."""
    if type(method) is tuple:
        return any(map(has_user_code, method))
    if not dataclasses.is_dataclass(method):
        return False
    parts = (getattr(method, f.name, None) for f in dataclasses.fields(method))
    return not _is_kvjaxs(type(method)) or any(map(has_user_code, parts))


def _described(value: Any) -> str:
    """Like `repr`, but of the fields that count: a table has its digest for its path, and a method no string."""
    if type(value) is tuple:
        return f"({', '.join(map(_described, value))})"
    if not dataclasses.is_dataclass(value):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # a function's address is another one in each process
    own = not _is_kvjaxs(type(value))
    names = [field.name for field in dataclasses.fields(value) if field.compare or own]
    fields = ", ".join(f"{name}={_described(getattr(value, name, None))}" for name in names)
    return f"{type(value).__qualname__}({fields}){_text(type(value)) if own else ''}"


@functools.cache  # what a class was when it was first asked for, whatever becomes of its file
def _text(cls: type) -> str:
    """What is written in a class and in those it is made of, except kvjax's and Python's."""
    texts = []
    for each in cls.__mro__:
        if each.__module__.partition(".")[0] in ("kvjax", *sys.stdlib_module_names):
            continue
        try:
            texts.append(inspect.getsource(each))
        except (OSError, TypeError):  # it is in no file
            texts.append(each.__qualname__)
    return "".join(texts)


def _is_kvjaxs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "kvjax"
