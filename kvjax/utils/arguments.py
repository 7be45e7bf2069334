"""Checks of numbers, dtypes and names, in one place, so that all public calls report errors alike."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import KvjaxError

DTYPES = ("float32", "bfloat16", "float16")
"""Types that parameters and caches may have."""
SHORT_DTYPES = {"f32": "float32", "fp32": "float32", "bf16": "bfloat16", "f16": "float16", "fp16": "float16"}
"""Abbreviations of papers and other programs; NumPy reads "f16" as a float of 16 bytes."""


def integer(name: str, value: Any, least: int = 1, most: int = 2**31 - 1, remedy: str = "") -> int:
    """Returns `value` as an int; raises KvjaxError unless it is an integer from `least` to `most`."""
    if not _is_scalar(value, numbers.Integral, "iu") or not least <= value <= most:
        raise KvjaxError(f"{name} must be an integer from {least} to {most}, got {value!r:.80}{remedy}")
    return int(value)


def number(name: str, value: Any, least: float, most: float, remedy: str = "") -> float:
    """Returns `value` as a float; raises KvjaxError unless it is a finite number from `least` to `most`."""
    if not _is_scalar(value, numbers.Real, "iuf") or not math.isfinite(value) or not least <= value <= most:
        raise KvjaxError(f"{name} must be a number from {least:g} to {most:g}, got {value!r:.80}{remedy}")
    return float(value)


def float_type(dtype: Any) -> np.dtype:
    """Returns one of DTYPES, given as a type or by its long or short name; raises KvjaxError for any other."""
    try:
        known = jnp.dtype(dtype_name(dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        known = None
    if known is None or known.name not in DTYPES:
        short = ", ".join(SHORT_DTYPES)
        raise KvjaxError(f"dtype must be one of {', '.join(DTYPES)}, or {short}, got {dtype!r:.80}")
    return known


def dtype_name(word: str) -> str:
    """Returns the long name of a dtype's short name; any other word stays as it is."""
    return SHORT_DTYPES.get(word, word)


def suggest_name(name: str, known: Iterable[str], likeness: float = 0.5) -> str:
    """A question for the known name that is nearest to an unknown one, or "" where none has that likeness, 0 to 1."""
    close = difflib.get_close_matches(name, list(known), 1, likeness)
    return f"; did you mean {close[0]!r}?" if close else ""


def _is_scalar(value: Any, kind: type, dtypes: str) -> bool:
    """Whether `value` is a scalar of Python, NumPy or JAX of that kind; booleans are not numbers."""
    if isinstance(value, jax.Array):
        return value.ndim == 0 and value.dtype.kind in dtypes
    return isinstance(value, kind) and not isinstance(value, bool)
