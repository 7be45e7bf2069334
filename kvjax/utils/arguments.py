"""What numbers and types of numbers the public calls take: checked in one place, so that all errors say it alike."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import KvjaxError

DTYPES = ("float32", "bfloat16", "float16")
"""Of parameters and caches."""
SHORT_DTYPES = {"f32": "float32", "fp32": "float32", "bf16": "bfloat16", "f16": "float16", "fp16": "float16"}
"""How papers and other programs call them; NumPy's own "f16" is a number of 16 bytes."""


def integer(name: str, value: Any, least: int = 1, most: int = 2**31 - 1, remedy: str = "") -> int:
    """`value` as an int; raises KvjaxError where it is none, or below `least` or above `most`."""
    if not _is(value, numbers.Integral, "iu") or not least <= value <= most:
        raise KvjaxError(f"{name} must be an integer from {least} to {most}, got {value!r:.80}{remedy}")
    return int(value)


def number(name: str, value: Any, least: float, most: float, remedy: str = "") -> float:
    """`value` as a float; raises KvjaxError where it is no finite number, or below `least` or above `most`."""
    if not _is(value, numbers.Real, "iuf") or not math.isfinite(value) or not least <= value <= most:
        raise KvjaxError(f"{name} must be a number from {least:g} to {most:g}, got {value!r:.80}{remedy}")
    return float(value)


def float_type(dtype: Any) -> np.dtype:
    """One of DTYPES, given by its name, long or short, or as a type; raises KvjaxError for another."""
    try:
        found = jnp.dtype(dtype_name(dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        short = ", ".join(SHORT_DTYPES)
        raise KvjaxError(f"dtype must be one of {', '.join(DTYPES)}, or {short}, got {dtype!r:.80}")
    return found


def dtype_name(word: str) -> str:
    """The long name of a dtype that is called by a short one; any other word as it is."""
    return SHORT_DTYPES.get(word, word)


def _is(value: Any, kind: type, dtypes: str) -> bool:
    """Whether it is a number of Python, NumPy or JAX of that kind; truth values are none."""
    if isinstance(value, jax.Array):
        return value.ndim == 0 and value.dtype.kind in dtypes
    return isinstance(value, kind) and not isinstance(value, bool)
