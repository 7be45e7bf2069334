"""Methods of one's own by their names: from files, modules and installed packages."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

import kvjax
from kvjax import KvjaxError, cli, testing
from kvjax.errors import KvjaxWarning
from kvjax.eval.page import paired_difference
from kvjax.eval.run import store
from kvjax.method_api import load_methods
from kvjax.registry import loading
from kvjax.registry.method_hash import method_hash
from kvjax.registry.registration import REGISTRY
from kvjax.testing import toy_model

ROOT = Path(kvjax.__file__).parent.parent
VALUE_NORM = """
import dataclasses

import jax.numpy as jnp

from kvjax.method_api import Method, Scorer, token_scores, register_method, make_selection


@dataclasses.dataclass(frozen=True)
class ValueNorm(Scorer):
    "Tokens with large values matter."

    def scores(self, block, observation, spec):
        return token_scores({sign}jnp.linalg.norm(block.v.astype(jnp.float32), axis=-1), block)


@register_method
def {name}(budget: int = 256) -> Method:
    "After the prompt each head keeps the tokens with the largest values."
    return Method(select=make_selection(ValueNorm(), budget))
"""


@pytest.fixture(autouse=True)
def nothing_remains(clean_registry, monkeypatch, tmp_path):
    """Paths and what was loaded are as before."""
    monkeypatch.setenv("KVJAX_CACHE", jax.config.jax_compilation_cache_dir)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(loading, "_loaded", {})
    monkeypatch.chdir(tmp_path)


def write(path, text=VALUE_NORM, name="value_norm", sign=""):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.replace("{name}", name).replace("{sign}", sign))
    return path


def test_a_file_is_loaded_from_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine.py")
    assert load_methods("~/mine.py") == ("value_norm",)
    write(tmp_path / "worse.py", "x = 1\n1 / 0\n")
    with pytest.raises(KvjaxError, match=r"~/worse.py.*line 2"):
        load_methods("~/worse.py")


def test_a_loaded_method_works_in_strings_wherever_methods_do(tmp_path):
    model = toy_model(layers=1)
    with pytest.raises(
        KvjaxError, match="unknown method 'value_norm'; .*--load FILE.*kvjax.method_api.load_methods.*entry"
    ):
        kvjax.parse("value_norm:budget=4")
    assert load_methods(write(tmp_path / "mine.py")) == ("value_norm",)
    assert kvjax.name_of(kvjax.parse("value_norm:budget=4 + kivi:bits=4")) == "value_norm:budget=4 + kivi:bits=4"
    out = kvjax.generate(model, [[1, 2, 3, 4, 5, 6]], "value_norm:budget=4 + int4", max_new_tokens=2)
    assert len(out.tokens[0]) == 2
    with pytest.raises(KvjaxError, match="did you mean 'value_norm'"):
        kvjax.parse("valuenorm")
    with pytest.raises(KvjaxError, match="value_norm has no parameter 'bugdet'; did you mean 'budget'"):
        kvjax.parse("value_norm:bugdet=4")


def test_a_file_is_loaded_once_and_again_when_it_was_edited(tmp_path):
    path = write(tmp_path / "mine.py")
    load_methods(path)
    method, before = kvjax.parse("value_norm"), method_hash(kvjax.parse("value_norm"))
    assert load_methods(str(path)) == ("value_norm",) and kvjax.parse("value_norm") == method
    assert load_methods("./mine.py") == ("value_norm",) and kvjax.parse("value_norm") == method
    assert load_methods("mine") == load_methods("mine.py") == ("value_norm",)  # also as a module of its own
    write(path, sign="-")
    assert load_methods(path) == ("value_norm",)
    assert method_hash(kvjax.parse("value_norm")) != before == method_hash(method)
    write(path)
    assert load_methods(path) == ("value_norm",) and method_hash(kvjax.parse("value_norm")) == before
    write(path, "1 / 0")
    with pytest.raises(KvjaxError, match="line 1: ZeroDivisionError"):
        load_methods(path)
    assert method_hash(kvjax.parse("value_norm")) == before  # what was there before stays
    write(path, name="other")
    assert load_methods(path) == ("other",) and "value_norm" not in REGISTRY


def test_a_file_that_was_imported_can_be_loaded_too(tmp_path):
    path = write(tmp_path / "mine_too.py")
    sys.path.append(str(tmp_path))
    import mine_too  # type: ignore

    assert load_methods(path) == ("value_norm",)
    assert REGISTRY["value_norm"].make(4).string == mine_too.value_norm(4).string


def test_a_value_of_a_loaded_file_pickles_for_another_process(tmp_path):
    load_methods(path := write(tmp_path / "mine.py"))
    pickled = pickle.dumps(kvjax.parse("value_norm:budget=4"))
    code = "import sys, pickle; from kvjax.method_api import load_methods; load_methods(sys.argv[1]); "
    code += "print(pickle.load(sys.stdin.buffer).string)"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_bytes(path.read_bytes())  # another folder, as on another machine
    command = [sys.executable, "-c", code, str(tmp_path / "other" / "mine.py")]
    done = subprocess.run(command, input=pickled, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.decode() == "value_norm:budget=4\n", done.stderr


def test_a_module_of_a_package_and_what_it_brings(tmp_path):
    (tmp_path / "ideas").mkdir()
    (tmp_path / "ideas" / "__init__.py").write_text("from ideas.norms import value_norm\n")
    path = write(tmp_path / "ideas" / "norms.py")
    assert load_methods("ideas") == load_methods("ideas.norms") == load_methods(path) == ("value_norm",)


def test_a_file_named_like_a_known_module_does_not_stand_in_for_it(tmp_path):
    import random

    assert load_methods(write(tmp_path / "random.py")) == ("value_norm",)
    assert sys.modules["random"] is random
    assert load_methods(write(tmp_path / "sndhdr_of_mine-2.py", name="second")) == ("second",)


def test_two_files_of_one_name_and_a_neighbour(tmp_path):
    first = write(tmp_path / "a" / "mine.py", "from neighbour import NAME\n" + VALUE_NORM)
    (tmp_path / "a" / "neighbour.py").write_text("NAME = 1\n")
    second = write(tmp_path / "b" / "mine.py", name="second")
    assert load_methods(first) == ("value_norm",) and load_methods(second) == ("second",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import jax\n\nx = nowhere\n", "mine.py, line 3: NameError: name 'nowhere' is not defined"),
        ("import jax\nimport nosuchmodule\n", "mine.py, line 2: ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("def f(:\n", "mine.py, line 1: SyntaxError: invalid syntax"),
        ("from . import x\n", "mine.py, line 1: ImportError: .*relative import.*give its module's name"),
        (
            "import sys\nsys.exit(1)\n",
            "mine.py, line 2: it ends the program as it is loaded; put that below `if __name",
        ),
        ("x = 1\n", "mine.py defines no method; one is a function below `@register_method"),
        (VALUE_NORM.replace("{name}", "snapkv"), "mine.py, line 17: kvjax has a method called snapkv"),
        (VALUE_NORM + "\nraise ValueError('two\\nlines')\n", "mine.py, line 22: ValueError: two$"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_in_a_line(tmp_path, capsys, text, says):
    write(tmp_path / "mine.py", text)
    with pytest.raises(KvjaxError, match=says) as error:
        load_methods("mine.py")
    assert "\n" not in str(error.value)
    assert "value_norm" not in REGISTRY  # nor can half of it be used
    assert cli.main(["methods", "--load", "mine.py"]) == 2
    assert capsys.readouterr().err == f"kvjax: {error.value}\n"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nosuch.py", "'nosuch.py' does not exist; give a file such as"),
        ("folder", "'folder' is no Python file; give a file such as"),
        ("notes.txt", "'notes.txt' is no Python file"),
        ("nosuch", "neither a file nor a module nosuch; for example my_method.py"),
        ("no-such", "'no-such' is neither a file nor the name of a module"),
        ("broken_module", "broken_module: broken_module.py, line 1: ZeroDivisionError"),
    ],
)
def test_what_is_no_source_of_methods(tmp_path, source, says):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    with pytest.raises(KvjaxError, match=says):
        load_methods(source)


def test_one_name_in_two_files_is_an_error_that_names_both(tmp_path):
    load_methods(write(tmp_path / "a.py"))
    before = REGISTRY["value_norm"]
    with pytest.raises(
        KvjaxError, match=r"b.py, line 17: two files define a method called value_norm: .*a.py and .*b.py"
    ):
        load_methods(write(tmp_path / "b.py"))
    assert REGISTRY["value_norm"] is before


def test_every_command_loads(tmp_path, capsys):
    write(tmp_path / "mine.py")
    write(tmp_path / "more.py", name="second")
    assert cli.main(["methods", "--load", "mine.py", "--load", "more.py", "--json"]) == 0
    known = {m["name"]: m for m in json.loads(capsys.readouterr().out)}
    assert known["value_norm"]["family"] == known["second"]["family"] == "your own"
    generate = ["generate", "--load", "mine.py", "--prompt", "def main", "--max-new-tokens", "1"]
    assert cli.main([*generate, "--method", "value_norm:budget=8 + kivi:bits=4"]) == 0
    assert "not used" not in capsys.readouterr().err
    assert cli.main(generate) == 0
    assert "value_norm is loaded and not used; ask for it, as in --method value_norm" in capsys.readouterr().err
    for command in ("demo", "eval", "explore", "calibrate", "report", "check"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert "--load FILE" in capsys.readouterr().out


CHECKED = ["check", "--load", "mine.py", "value_norm:budget=8", "--length", "20"]


def test_a_method_is_checked_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(testing, "toy_model", functools.partial(toy_model, layers=1))
    path = write(tmp_path / "mine.py")
    assert cli.main(CHECKED) == 0
    assert "value_norm:budget=8 keeps all" in capsys.readouterr().out
    write(path, VALUE_NORM.replace("axis=-1)", "axis=-1).mean(0)[None] + 0 * block.v[..., 0]"))
    assert cli.main(CHECKED) == 1
    output = capsys.readouterr().err
    assert "breaks a rule of methods: independence: " in output and len(output.splitlines()) == 1
    assert cli.main(["check", "--load", "mine.py", "value_norm:bugdet=8"]) == 2


EVAL = ["eval", "--tasks", "niah", "--lengths", "64", "--contexts", "1", "--depths", "1", "--no-speed", "--out", "run"]


def test_a_run_goes_on_with_the_file_and_not_with_an_edited_one(tmp_path, capsys):
    path = write(tmp_path / "mine.py")

    def run(*args: str) -> int:
        return cli.main([*EVAL, "--load", "mine.py", "--methods", "full; value_norm:budget=16", *args])

    assert run() == 0
    records = (tmp_path / "run" / store.RECORDS).read_text().splitlines()
    (tmp_path / "run" / store.RECORDS).write_text(records[0] + "\n")  # as if it had been killed
    assert run() == 0
    assert (tmp_path / "run" / store.RECORDS).read_text().splitlines() == records
    write(path, sign="-")
    capsys.readouterr()
    assert run() == 2
    assert "'value_norm:budget=16' is not the method that was recorded under this name" in capsys.readouterr().err
    # A report needs no file: the records say what is known of the method.
    del REGISTRY["value_norm"]
    recorded_run = paired_difference.RecordedRun(store.read(tmp_path / "run"))
    assert recorded_run.traits["value_norm:budget=16"].evicts
    assert cli.main(["report", "run"]) == 0


def test_equal_bytes_choose_the_size_of_ones_own_method(tmp_path, capsys):
    write(tmp_path / "mine.py")
    args = [*EVAL, "--load", "mine.py", "--methods", "value_norm", "--budget-bytes", "1/2"]
    assert cli.main(args) == 0
    assert "value_norm:budget=" in capsys.readouterr().out


def test_lm_evaluation_harness_loads_methods(tmp_path):
    from kvjax.eval.lm_harness import KvjaxLM

    write(tmp_path / "mine.py")
    model = KvjaxLM(toy_model(layers=1), method="value_norm:budget=4 + int4", load="mine.py")
    assert model.method == kvjax.parse("value_norm:budget=4 + int4")


SCRIPT = """
if __name__ == "__main__":
    import sys
    from kvjax import cli
    from kvjax.method_api import load_methods

    assert load_methods(__file__) == ("value_norm",)
    sys.exit(cli.main(["methods", "--load", "mine.py", "value_norm"]))
"""


@pytest.mark.parametrize("command", [["mine.py"], ["-m", "mine"]])
def test_a_script_that_loads_itself_has_its_methods_already(tmp_path, monkeypatch, command):
    write(tmp_path / "mine.py", VALUE_NORM + SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "value_norm(" in done.stdout and done.stderr == ""


def entry(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, loading.ENTRY_POINT_GROUP)


def test_installed_packages_bring_methods_and_a_broken_one_is_named(tmp_path, monkeypatch):
    write(tmp_path / "one_package.py", "import kvjax\nBASE = kvjax.parse('full')\n" + VALUE_NORM)
    write(tmp_path / "another_package.py", name="second")
    write(tmp_path / "broken_package.py", VALUE_NORM + "\n1 / 0\n", name="third")
    write(tmp_path / "strange_package.py", "strange = 1\n")
    entry_points = [
        entry("broken", "broken_package"),
        entry("module", "one_package"),
        entry("function", "another_package:second"),
        entry("strange", "strange_package:strange"),
        entry("empty", "strange_package"),
    ]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(loading, "_waiting_entry_points", lambda: entry_points)
    with pytest.warns(KvjaxWarning) as warned:
        assert kvjax.parse("value_norm:budget=4 + int4") and kvjax.parse("second")
    messages = [str(w.message) for w in warned]
    assert len(messages) == 3  # once each, whatever is asked for later
    assert "entry point broken = broken_package fails: ZeroDivisionError: division by zero" in messages[0]
    assert "entry point strange = strange_package:strange fails: it is neither a module nor" in messages[1]
    assert "entry point empty = strange_package fails: the module defines no method" in messages[2]


def test_an_installed_package_is_found_by_its_metadata(tmp_path, monkeypatch):
    folder = tmp_path / "found_package-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: found-package\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        textwrap.dedent("""\
        [kvjax.methods]
        norms = found_package
        """)
    )
    write(tmp_path / "found_package.py", name="found_norm")
    monkeypatch.syspath_prepend(tmp_path)
    loading._waiting_entry_points.cache_clear()
    try:
        assert kvjax.parse("found_norm:budget=4")
    finally:
        loading._waiting_entry_points.cache_clear()
