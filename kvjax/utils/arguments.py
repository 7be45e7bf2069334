"""Checks of numbers, dtypes and names, in one place, so that all public calls report errors alike."""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import KvjaxError

DTYPES = ("float32", "bfloat16", "float16")
"""Types that parameters and caches may have."""
BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
SHORT_DTYPES = {"f32": "float32", "fp32": "float32", "bf16": "bfloat16", "f16": "float16", "fp16": "float16"}
"""Abbreviations of papers and other programs; NumPy reads "f16" as a float of 16 bytes."""


def integer(name: str, value: Any, least: int = 1, most: int = 2**31 - 1, remedy: str = "") -> int:
    """Returns `value` as an int; raises KvjaxError unless it is an integer from `least` to `most`."""
    rule = f"{name} must be an integer from {least} to {most}"
    return int(_scalar(rule, value, numbers.Integral, least, most, remedy))


def number(name: str, value: Any, least: float, most: float, remedy: str = "") -> float:
    """Returns `value` as a float; raises KvjaxError unless it is a finite number from `least` to `most`."""
    rule = f"{name} must be a number from {least:g} to {most:g}"
    return float(_scalar(rule, value, numbers.Real, least, most, remedy))


def _scalar(rule: str, value: Any, kind: type, least: float, most: float, remedy: str) -> Any:
    """Returns `value` if it is a scalar of Python, NumPy or JAX of that kind in the range; booleans are not numbers."""
    if isinstance(value, jax.Array):
        dtypes = "iu" if kind is numbers.Integral else "iuf"
        is_scalar = value.ndim == 0 and value.dtype.kind in dtypes
    else:
        is_scalar = isinstance(value, kind) and not isinstance(value, bool)
    if not is_scalar or not least <= value <= most or not math.isfinite(value):
        raise KvjaxError(f"{rule}, got {value!r:.80}{remedy}")
    return value


def environment_switch(name: str) -> bool:
    """Reads an environment variable that is 1 unless it says 0; raises KvjaxError for any other word."""
    word = os.environ.get(name) or "1"
    if word.lower() not in BOOLEANS:
        raise KvjaxError(f"the environment variable {name} is {word!r:.60}; set it to 0 or 1, or unset it")
    return BOOLEANS[word.lower()]


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
    """A question for the known name that is nearest to an unknown one, or "" where none has that likeness, 0 to 1.

    Capital letters make no difference: papers write H2O and KIVI.
    """
    by_lower = {x.lower(): x for x in known}
    close = difflib.get_close_matches(name.lower(), by_lower, 1, likeness)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
