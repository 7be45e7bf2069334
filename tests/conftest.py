"""Strictness for all tests: nothing is promoted, broadcast or warned about silently."""

from __future__ import annotations

import itertools

import jax
import pytest

from kvjax.core import program
from kvjax.methods.catalogue import RECIPES

jax.config.update("jax_num_cpu_devices", 4)  # what a mesh needs; other tests use the first
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the tests' time


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs beside pytest's own cache, so that a second run of the tests is quick."""
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


_count = itertools.count()


@pytest.fixture(autouse=True)
def few_programs():
    """A process may hold only so many memory mappings, and each compiled program takes several."""
    yield
    if next(_count) % 8 == 0:
        program.forget_many(20_000)


@pytest.fixture
def clean_catalogue():
    """What a test registers is gone when it ends."""
    before = dict(RECIPES)
    yield
    for name in set(RECIPES) - set(before):
        del RECIPES[name]
