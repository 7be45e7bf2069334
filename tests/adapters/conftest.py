"""Tests of the adapters, against the packages themselves: `make adapters` installs these and runs the tests.

Where a package is not installed, its test file is not collected, and the first lines of a run say so. The packages
promote dtypes and ranks and warn, which the other tests forbid: here both are as users have them.
"""

import importlib
import importlib.util
import warnings

import jax
import pytest

from tests.adapters import absent_packages

PACKAGES = {"test_tunix.py": "tunix", "test_gemma.py": "gemma"}
ABSENT = {file: name for file, name in PACKAGES.items() if importlib.util.find_spec(name) is None}
collect_ignore = [*ABSENT]

if len(ABSENT) < len(PACKAGES):
    absent_packages.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "test_tunix.py" not in ABSENT:
            for name in ("generate.sampler", *(f"models.{x}.model" for x in "gemma gemma3 llama3 qwen2 qwen3".split())):
                importlib.import_module(f"tunix.{name}")
        if "test_gemma.py" not in ABSENT:
            importlib.import_module("kvjax.adapters.gemma")


def pytest_report_header() -> list[str]:
    return [
        f"tests/adapters/{file} is not collected: {name} is not installed (make adapters)"
        for file, name in ABSENT.items()
    ]


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if "tests/adapters" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def promotions_of_users():
    """The rules of promotion that hold where nobody changes them."""
    names = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
