"""The tests of `make quick`: what a change needs at the desk, in minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

LEFT_OUT = (
    *("docs", "eval", "experiments", "explore", "planning", "processes"),  # whole programs, and processes
    *("engine/test_gradients.py", "engine/test_transformations.py"),  # the same steps, under JAX's transformations
    *("attach/test_every_method.py", "attach/test_explicit_mesh.py"),  # the same steps, in another decoder
    *("contract/test_check_method.py", "contract/test_products.py"),  # the rules of `kvjax check`, and pairs
)
"""Folders and files of tests that are left out; `@pytest.mark.whole` leaves out a single test that takes long."""
BY_METHOD = ("cache", "contract", "engine", "methods")
"""Folders whose tests run under every method, and find faults of components."""


def is_in(item: pytest.Item) -> bool:
    """Whether a test is one of `make quick`.

    Where a test runs under every method, those stay that bring a class of component, and of a method's cases the first.
    """
    from tests.contract.cases import CASES, FIRST_CASES
    from tests.contract.method_case import MethodCase
    from tests.contract.table import representative_methods

    path = item.path.relative_to(Path(__file__).parents[1])
    if item.get_closest_marker("whole") or any(path.is_relative_to(part) for part in LEFT_OUT):
        return False
    values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    by_text = {text: case for case in CASES for text in (case.id, case.small)}
    cases = [x if isinstance(x, MethodCase) else by_text.get(x) for x in values if isinstance(x, MethodCase | str)]
    for case in filter(None, cases):
        if case is not FIRST_CASES[case.method]:
            return False
        if path.parts[0] in BY_METHOD and case.method not in representative_methods():
            return False
    return True
