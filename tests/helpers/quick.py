"""The tests of `make quick`: what a change needs at the desk, in minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

LEFT_OUT = ("docs", "eval", "experiments", "explore", "planning", "processes")
"""Folders of tests that run whole programs, or start processes."""
BY_METHOD = ("attach", "engine", "contract/test_devices.py", "contract/test_outside.py", "contract/test_toy.py")
"""Folders and files whose tests are about components, under every method that has them."""


def is_in(item: pytest.Item) -> bool:
    """Whether a test is one of `make quick`.

    Where a test runs under every method, those stay that bring a class of component, and of a method's cases the first.
    """
    from tests.contract.cases import CASES, FIRST_CASES
    from tests.contract.method_case import MethodCase
    from tests.contract.table import representative_methods

    path = item.path.relative_to(Path(__file__).parents[1])
    if path.parts[0] in LEFT_OUT:
        return False
    values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    by_id = {case.id: case for case in CASES}
    cases = [x if isinstance(x, MethodCase) else by_id.get(x) for x in values if isinstance(x, MethodCase | str)]
    is_by_method = any(path.is_relative_to(part) for part in BY_METHOD)
    for case in filter(None, cases):
        if case is not FIRST_CASES[case.method] or (is_by_method and case.method not in representative_methods()):
            return False
    return True
