"""`pip install` gets every module and every file that code reads, one version, and the package of a clone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvjax", "checkpoints_convert")
ASK = """
import json, os
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

built = apply_configuration(Distribution({"script_name": ""}), "pyproject.toml").get_command_obj("build_py")
built.ensure_finalized()
files = [file for *_, file in built.find_all_modules()]
files += [os.path.join(data[1], file) for data in built.get_data_files_without_manifest() for file in data[3]]
print(json.dumps({"folder": built.distribution.package_dir, "files": [os.path.normpath(file) for file in files]}))
"""
"""Asks setuptools, without building anything: the packages' folder, and the files that go into a wheel."""


@cache
def ask_setuptools() -> dict:
    """The answer to ASK, in a process of its own: importing setuptools changes the interpreter."""
    done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def package_files() -> set[str]:
    """The files of the packages, without what Python or an editor leaves there."""
    paths = (path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts and not path.name.startswith(".")}


def test_a_wheel_has_every_file_of_the_packages_and_no_other():
    """A file that is missing needs its pattern in `package-data` of pyproject.toml, or its folder an __init__.py."""
    expected = package_files()
    assert {".j2", ".json", ".safetensors", ".ocdbt", ".py"} <= {Path(path).suffix for path in expected}
    assert set(ask_setuptools()["files"]) == expected


def test_an_editable_install_puts_the_folder_of_the_packages_on_the_path():
    """Otherwise Python, started next to a clone named kvjax, finds that folder before the installed package."""
    assert ask_setuptools()["folder"] == {"": "."}


def test_all_files_say_the_same_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == version
    assert re.findall(r"^## \[([^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[:2] == ["Unreleased", version]


def test_commits_are_formatted_by_the_ruff_of_the_constraints():
    pinned = re.search(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert re.findall(r"^ *rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text(), re.M) == [pinned]


IMPORT = """
import importlib, json, pkgutil, sys

absent = ["altair", "gguf", "jinja2", "lm_eval", "matplotlib", "rapidfuzz", "rouge_score", "torch", "vl_convert"]
sys.modules.update(dict.fromkeys(absent))
failed = []
for package in ("kvjax", "checkpoints_convert"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        try:
            importlib.import_module(module.name)
        except (ImportError, ValueError):  # a KvjaxError, which names the extra, is a ValueError
            failed.append(module.name)
print(json.dumps(failed))
"""
"""The modules that cannot be imported without what the extras install."""


def test_what_needs_an_extra_is_imported_by_nothing_else():
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = {f"kvjax.eval.page.{name}" for name in ("charts", "report")}
    gguf = {f"checkpoints_convert.gguf.{name}" for name in ("header", "gguf_source")}
    assert set(json.loads(done.stdout)) == {*page, *gguf, "kvjax.adapters.gemma", "kvjax.eval.lm_harness"}
