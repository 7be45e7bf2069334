"""Ranges and choices in the types of fields: what passes, and what an error says."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from typing import Annotated, Literal

import numpy as np
import pytest

import kvjax
from kvjax.errors import KvjaxError
from kvjax.utils import parameter_types
from kvjax.utils.parameter_types import Odd, OneOf, PositiveInt, UnitFloat, Within, check_fields


@dataclasses.dataclass(frozen=True)
class Inner:
    pass


@dataclasses.dataclass(frozen=True)
class Part:
    count: PositiveInt = 4
    share: Annotated[float, Within("(0, 1]")] = 0.5
    weight: UnitFloat | None = None
    kernel: Annotated[int, Odd()] = 3
    bits: Annotated[int, OneOf((2, 4))] = 4
    rule: Literal["near", "far"] = "near"
    is_exact: bool = False
    inner: Inner | None = None
    sizes: tuple[PositiveInt, ...] = ()

    __post_init__ = check_fields


def test_what_lies_in_its_range_passes():
    Part(1, 1, 0, 1, 2, "far")
    Part(np.int32(7), np.float32(0.25), None)
    Part(is_exact=True, inner=Inner(), sizes=(1, 2))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"count": 0}, "Part: count must be at least 1, got 0; use 4, the default"),
        ({"count": 1.0}, "count must be a whole number, got 1.0"),
        ({"count": True}, "count must be a whole number, got True"),
        ({"share": 0}, r"share must lie in \(0, 1\], got 0; use 0.5"),
        ({"share": float("nan")}, r"share must lie in \(0, 1\], got nan"),
        ({"share": "1"}, "share must be a number, got '1'"),
        ({"weight": -1}, r"weight must lie in \[0, 1\], got -1$"),
        ({"kernel": 4}, "kernel must be odd and at least 1, got 4; use 3"),
        ({"bits": 3}, "bits must be one of 2, 4, got 3; use 4"),
        ({"rule": "fahr"}, "rule must be one of 'near', 'far', got 'fahr'; did you mean 'far'?"),
        ({"is_exact": 1}, "is_exact must be true or false, got 1"),
        ({"inner": 1}, "inner must be a Inner, got 1"),
        ({"sizes": [1]}, r"sizes must be a tuple, got \[1\]"),
        ({"sizes": (1, 0)}, "an entry of sizes must be at least 1, got 0"),
        ({"rule": None}, "rule must be one of 'near', 'far', got None; use 'near'"),
    ],
)
def test_what_lies_outside_is_named_with_the_range_and_the_default(fields, says):
    with pytest.raises(KvjaxError, match=says):
        Part(**fields)


def test_every_component_that_checks_its_fields_has_some_to_check():
    """A type that cannot be evaluated would be passed over in silence."""
    modules = [
        x.name for x in pkgutil.walk_packages(kvjax.__path__, "kvjax.") if "cache" in x.name or "methods" in x.name
    ]
    classes = {x for name in modules for x in vars(importlib.import_module(name)).values() if inspect.isclass(x)}
    checking = [x for x in classes if vars(x).get("__post_init__") is check_fields]
    assert len(checking) > 40 and all(parameter_types._checked_fields(x) for x in checking)
