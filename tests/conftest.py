"""Strictness for all tests: nothing is promoted, broadcast or warned about silently."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import pytest

from kvjax import program

jax.config.update("jax_num_cpu_devices", 4)  # what a mesh needs; other tests use the first
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs beside pytest's own cache, so that a second run of the tests is quick."""
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


_count = itertools.count()


@pytest.fixture(autouse=True)
def few_programs():
    """A process may hold some 65,000 memory mappings on Linux; each compiled program takes several."""
    yield
    maps = Path("/proc/self/maps")
    if next(_count) % 8 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        program.forget()
