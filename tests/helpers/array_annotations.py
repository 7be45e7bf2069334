"""Checks the array annotations of kvjax in every call that the tests make: dtypes, and axes that must agree."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

CHECKED = ("kvjax.core", "kvjax.engine", "kvjax.cache.components", "kvjax.cache.storage")
"""Packages whose functions are checked."""


def check_calls() -> None:
    """Has the packages checked that are imported from here on."""
    install_import_hook(CHECKED, f"{__name__}.check_arrays")


def check_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function check its arguments and its result, where they are annotated as arrays with axes.

    All other types are left to pyright, and to the errors of kvjax, whose words tests compare.
    """
    # JAX builds pytrees anew around whatever stands for their arrays: tracers, shardings, numbers of axes, None.
    if function.__name__ == "__init__":
        return function
    hints = {name: _admit_numpy(hint) for name, hint in function.__annotations__.items() if _has_axes(hint)}
    function.__annotations__ = hints
    return beartype(function) if hints else function


def _has_axes(hint: Any) -> bool:
    return _is_array(hint) or any(_has_axes(part) for part in get_args(hint))


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _admit_numpy(hint: Any) -> Any:
    """Tests call functions with NumPy's arrays too, as one may any function of JAX."""
    if _is_array(hint):
        return hint | hint.dtype[np.ndarray, hint.dim_str]
    if get_origin(hint) in (Union, UnionType):
        return functools.reduce(operator.or_, map(_admit_numpy, get_args(hint)))
    return hint
