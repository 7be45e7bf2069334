"""The public surface: its names, the modules that an import loads, and the names of every `__all__`."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvjax
from kvjax.methods.loading import load_all
from kvjax.methods.registry import REGISTRY, is_builtin

ROOT = Path(__file__).parents[2]
NAMED = (
    "cache_ops",
    "cachegen",
    "errors",
    "eval",
    "functional",
    "methods",
    "method_api",
    "reuse",
    "speculative",
    "testing",
)
"""The public modules below the top."""


def run_code(code: str) -> list[str]:
    """Runs code in a fresh interpreter; returns the JSON that it prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def modules_with_all() -> list[str]:
    names = ["kvjax", *(module.name for module in pkgutil.walk_packages(kvjax.__path__, "kvjax."))]
    sources = {name: ROOT.joinpath(*name.split(".")) for name in names}
    files = {name: path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for name, path in sources.items()}
    return [name for name, file in files.items() if "__all__" in file.read_text()]


@pytest.mark.parametrize("module", modules_with_all())
def test_every_name_of_all_is_there(module):
    namespace: dict[str, object] = {}
    exec(f"from {module} import *", namespace)
    names = importlib.import_module(module).__all__
    assert set(names) <= namespace.keys() and len(set(names)) == len(names)


def test_the_top_shows_its_names_and_no_others():
    assert dir(kvjax) == sorted(kvjax.__all__) and len(dir(kvjax)) <= 30
    assert not set(NAMED) - {"methods"} & set(dir(kvjax))
    with pytest.raises(AttributeError, match="module 'kvjax' has no attribute 'read_exactly'"):
        _ = kvjax.read_exactly


def test_the_named_modules_are_attributes_before_anything_imports_them():
    code = f"import json, kvjax; print(json.dumps([getattr(kvjax, name).__name__ for name in {NAMED!r}]))"
    assert run_code(code) == [f"kvjax.{name}" for name in NAMED]


def test_kvjax_itself_imports_nothing_and_each_name_what_it_needs():
    """Flax, Orbax and the passes take longer than all that a script does with a configuration or an error."""
    count = "len([x for x in sys.modules if x.startswith(('kvjax.', 'jax', 'flax', 'orbax'))])"
    code = f"""
import json, sys
import kvjax
none = {count}
kvjax.KvjaxError
print(json.dumps([none, *(name in sys.modules for name in ("kvjax.errors", "jax", "flax", "kvjax.generation"))]))
"""
    assert run_code(code) == [0, True, False, False, False]


def test_the_methods_of_the_package_are_those_of_the_registry():
    names = sorted(name for name, entry in load_all().items() if is_builtin(entry.make))
    typed_names = re.findall(r"import (\w+) as \1$", Path(kvjax.methods.__file__).read_text(), re.MULTILINE)
    assert sorted(dir(kvjax.methods)) == sorted(kvjax.methods.__all__) == names and set(typed_names) <= set(names)
    assert all(getattr(kvjax.methods, name) is REGISTRY[name].make for name in names)


def test_a_method_is_found_by_its_name_whether_or_not_its_module_was_imported():
    code = """
import json
import kvjax
before = kvjax.methods.snapkv
import kvjax.methods.tova
import kvjax.methods.kivi as kivi
from kvjax.methods import quest
from kvjax.methods.quest import quest as same
after = [kvjax.methods.snapkv, kvjax.methods.tova, kvjax.methods.kivi, kivi, quest, same, kvjax.methods.quest]
print(json.dumps([type(x).__name__ for x in [before, *after]]))
"""
    assert run_code(code) == ["function"] * 8


def test_every_call_that_draws_names_its_keywords():
    """Editors and notebooks complete what a signature names."""
    calls = [kvjax.generate, kvjax.stream, kvjax.stream_text, kvjax.chat, kvjax.speculative.speculate]
    calls += [kvjax.Context.start, kvjax.Context.generate, kvjax.Context.stream, kvjax.Context.ask]
    for call in calls:
        parameters = inspect.signature(call).parameters
        assert {"sampling", "temperature", "top_k", "top_p", "min_p", "seed", "eos_ids"} <= parameters.keys()
        assert not any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
