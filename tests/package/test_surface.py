"""The public surface: its names, the modules that an import loads, and the names of every `__all__`."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvjax
from kvjax.errors import KvjaxError, UnknownKeyword
from kvjax.generation.options import GenerateOptions
from kvjax.registry.loading import load_all
from kvjax.registry.registration import REGISTRY, is_builtin

ROOT = Path(__file__).parents[2]
NAMED = (
    "cache_ops",
    "cachegen",
    "custom_decoder",
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
    assert dir(kvjax) == sorted(kvjax.__all__) and len(dir(kvjax)) <= 34
    assert not set(NAMED) - {"methods"} & set(dir(kvjax))
    with pytest.raises(AttributeError, match="No kvjax attribute read_exactly"):
        _ = kvjax.read_exactly
    with pytest.raises(AttributeError, match="kvjax.attend has moved to kvjax.custom_decoder.attend"):
        _ = kvjax.attend


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
    typed_names = re.findall(r"import (\w+) as \1$", (ROOT / "kvjax/methods/__init__.pyi").read_text(), re.MULTILINE)
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


GENERATING = [
    kvjax.generate,
    kvjax.stream,
    kvjax.stream_text,
    kvjax.chat,
    kvjax.speculative.speculate,
    kvjax.Context.start,
    kvjax.Context.generate,
    kvjax.Context.stream,
    kvjax.Context.ask,
]


@pytest.mark.parametrize("call", GENERATING, ids=lambda call: call.__qualname__)
def test_every_call_that_generates_names_and_describes_its_keywords(call):
    """Editors and notebooks complete what a signature names."""
    parameters = inspect.signature(call).parameters
    assert GenerateOptions.__annotations__.keys() <= parameters.keys()
    assert not any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
    assert all(f"\n  {name}: " in call.__doc__ for name in GenerateOptions.__annotations__)
    assert all(x.default is not x.empty for x in parameters.values() if x.kind is inspect.Parameter.KEYWORD_ONLY)


def public_calls() -> list[Callable]:
    """The functions of the public modules and the public methods of a context that take arguments."""
    modules = [getattr(kvjax, name) for name in NAMED if name not in {"errors", "methods", "method_api", "testing"}]
    calls = [getattr(module, name) for module in (kvjax, *modules) for name in module.__all__]
    calls += [kvjax.testing.check_method, *(x for name, x in vars(kvjax.Context).items() if not name.startswith("_"))]
    return [x for x in calls if inspect.isfunction(x) and inspect.signature(x).parameters.keys() - {"self"}]


def test_an_unknown_keyword_is_an_error_that_names_the_nearest_known_one():
    calls = public_calls()
    assert len(calls) > 45
    for call in calls:
        with pytest.raises(UnknownKeyword, match=re.escape(f"{call.__qualname__}() got an unexpected keyword")):
            call(qqqqq=1)
        for name, parameter in inspect.signature(call).parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL or name == "self" or len(name) < 4:
                continue
            misspelled = f"{name[:-1]}x{name[-1]}"
            says = f"unexpected keyword argument {misspelled!r}; did you mean {name!r}?"
            with pytest.raises(TypeError, match=re.escape(says)):
                call(**{misspelled: 1})


@pytest.mark.parametrize(
    ("call", "keyword", "says"),
    [
        (kvjax.generate, "max_tokens", "did you mean 'max_new_tokens'?"),
        (kvjax.generate, "max_length", "did you mean 'max_new_tokens'?"),
        (kvjax.Context.ask, "max_tokens", "did you mean 'max_new_tokens'?"),
        (kvjax.chat, "stop_strings", "did you mean 'stop'?"),
        (kvjax.stream, "eos_token_id", "did you mean 'eos_ids'?"),
        (kvjax.stream_text, "prompts", "did you mean 'prompt'?"),
        (kvjax.generate, "prompt", "did you mean 'prompts'?"),
        (kvjax.generate, "past_key_values", "did you mean 'cache'?"),
        (kvjax.generate, "do_sample", "a temperature above 0 draws tokens"),
        (kvjax.generate, "num_return_sequences", "give a prompt several times"),
        (kvjax.generate, "n", "give a prompt several times"),
        (kvjax.read, "prompts", "did you mean 'documents'?"),
        (kvjax.load, "torch_dtype", "did you mean 'dtype'?"),
        (kvjax.SamplingParams, "temprature", "did you mean 'temperature'?"),
        (kvjax.SamplingParams, "max_tokens", "; it takes temperature, "),
    ],
)
def test_the_names_of_other_libraries_are_known(call, keyword, says):
    with pytest.raises(
        KvjaxError, match=re.escape(f"unexpected keyword argument {keyword!r}") + ".*" + re.escape(says)
    ):
        call(**{keyword: 1})
