"""Strictness for all tests: nothing is promoted, broadcast or warned about silently."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys

import jax
import jaxtyping
import pytest

from tests.helpers import array_annotations

array_annotations.check_calls()  # before the first import of what is checked

from kvjax.core import compile_cache
from kvjax.engine import forward
from kvjax.generation import programs
from kvjax.registry.loading import load_all
from kvjax.registry.registration import REGISTRY
from tests.helpers import program_cache, quick

jax.config.update("jax_num_cpu_devices", 4)  # what a mesh needs; other tests use the first
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiling is most of the tests' time, and a program runs for milliseconds: hence few optimisations, the older of
# XLA's two emitters of CPU code, which takes a third of the time, and no division of a program into parts for threads,
# since the workers of the tests occupy the cores. JAX reads the flags when it first compiles; processes that tests
# start find all of it in their environment.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody looks up which lines a compiled operation is from
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
FLAGS = (
    os.environ.get("XLA_FLAGS", ""),
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ["XLA_FLAGS"] = " ".join(FLAGS).strip()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps every compiled program on disk, outside of the clone, so that a second run of the tests is quick."""
    folder = program_cache.folder()
    if not hasattr(config, "workerinput"):  # before the workers start
        program_cache.remove_oldest(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Programs of one operation are most of what the tests compile, so none is too small or too quick to keep.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Makes Python look for cycles more rarely: JAX allocates so much that it would do so all the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only what a change needs at the desk, in minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        chosen = [item for item in items if quick.is_in(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


_count = itertools.count()


@pytest.fixture(autouse=True)
def few_programs():
    """Clears compiled programs: each takes several memory mappings, and a process may hold a limited number."""
    yield
    if next(_count) % 8 == 0:
        compile_cache.clear_if_many(20_000)


@pytest.fixture
def clean_registry(tmp_path_factory):
    """Restores the registry of methods when a test ends, and forgets the modules and folders that it loaded."""
    before, folders = dict(load_all()), list(sys.path)
    yield
    sys.path[:] = folders
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path_factory.getbasetemp())):
            del sys.modules[name]
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.fixture
def unchecked_arrays(monkeypatch):
    """Leaves arrays unchecked, as they are for users: for what kvjax itself says of wrong ones."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def traced_calls(monkeypatch):
    """The calls for which a layer has been traced, once for each program."""
    calls, run_layer = [], forward.apply_layer

    @functools.wraps(run_layer)  # whose argument names `jax.jit` asks for
    def count_trace(*args, call, target):
        calls.append(call)
        return run_layer(*args, call=call, target=target)

    programs.jit_with.cache_clear()
    monkeypatch.setattr(forward, "apply_layer", count_trace)
    yield calls
    programs.jit_with.cache_clear()
