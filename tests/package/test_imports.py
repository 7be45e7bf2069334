"""`import kvjax` and the command line load no library that only some calls need, and no method; no import circles."""

from __future__ import annotations

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = [
    "jax.experimental.pallas",  # Triton behind it; only GPUs run the kernels
    "altair",
    "matplotlib",
    "optax",
    "orbax.checkpoint",
    "rich.progress",
    "safetensors",
    "tokenizers",
]
ASK = """
import json, sys
{code}
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize(
    "code", ["import kvjax", "from kvjax import *", "import kvjax.cli; kvjax.cli._parser().format_help()"]
)
def test_only_what_every_call_needs_is_imported(code):
    """These cost more than all of kvjax; the methods are imported one by one, when they are named."""
    done = subprocess.run([sys.executable, "-c", ASK.format(code=code)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "kvjax" in loaded
    assert loaded.isdisjoint(HEAVY)
    methods = {x.stem for x in (ROOT / "kvjax/methods").glob("*.py") if "\n@kv.register_method(" in x.read_text()}
    assert len(methods) > 60
    assert loaded.isdisjoint(f"kvjax.methods.{name}" for name in methods)
    assert not [name for name in loaded if name.startswith(("kvjax.eval", "kvjax.explore", "kvjax.testbed"))]


def modules() -> dict[str, Path]:
    """The modules of both packages by name."""
    files = [path for package in ("kvjax", "checkpoints_convert") for path in (ROOT / package).rglob("*.py")]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files)
    return dict(zip(names, files, strict=True))


def imports_of(path: Path, names: Iterable[str]) -> set[str]:
    """The modules among `names` that a file imports, inside functions and for types too."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return imported & set(names)


def test_a_folder_imports_only_from_folders_above_it_in_the_map():
    """The map is the table of CONTRIBUTING; imports within functions count, too."""
    folders = re.findall(r"^\| `(kvjax/\w+|checkpoints_convert)/` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert len(folders) > 8
    every, upward = modules(), []
    for number, folder in enumerate(folders):
        package = folder.replace("/", ".")
        below = tuple(name.replace("/", ".") + "." for name in folders[number + 1 :])
        for name, path in every.items():
            if name == package or name.startswith(f"{package}."):
                imported = imports_of(path, every)
                upward += [f"{name}: {x}" for x in imported if f"{x}.".startswith(below)]
    assert not upward


def test_what_stands_on_nothing_imports_nothing_of_the_floors_above():
    """`kvjax.errors` is the ground, and core and utils stand on it and on each other alone."""
    every = modules()
    for name, path in every.items():
        if name == "kvjax.errors" or name.startswith(("kvjax.core", "kvjax.utils")):
            grounds = ("kvjax.errors", "kvjax.core", "kvjax.utils")
            assert all(x.startswith(grounds) for x in imports_of(path, every) - {"kvjax"}), name


def test_components_know_the_protocol_alone_and_the_bound_layer_is_known_to_the_method_alone():
    every = modules()
    cache = {name: path for name, path in every.items() if name.startswith("kvjax.cache.")}
    assert imports_of(every["kvjax.cache.storage"], cache) == {"kvjax.cache.protocol"}
    below = {"kvjax.cache.protocol", "kvjax.cache.storage", "kvjax.cache.eviction.granularity"}
    assert imports_of(every["kvjax.cache.components"], cache) == below
    naming = {path.name for name, path in every.items() if "MethodLayer" in path.read_text()}
    assert naming <= {"bound_layer.py", "rings.py", "method.py", "compose.py"}


def test_a_method_takes_its_names_from_method_api_and_from_two_modules_more_at_most():
    """As a user's file does; what several methods need belongs on that page, and nothing there has a second address."""
    tree = ast.parse((ROOT / "kvjax/method_api.py").read_text())
    homes = {node.module: {x.name for x in node.names} for node in tree.body if isinstance(node, ast.ImportFrom)}
    for path in (ROOT / "kvjax/methods").glob("[!_]*.py"):
        imports = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Import | ast.ImportFrom)]
        assert not any(isinstance(x, ast.Import) and "kvjax" in ast.unparse(x) for x in imports), path
        ours = {x.module: {y.name for y in x.names} for x in imports if "kvjax" in (getattr(x, "module", None) or "")}
        assert ours.pop("kvjax") == {"method_api"} and len(ours) <= 2, path
        assert not any(names & homes.get(module, set()) for module, names in ours.items()), path


def test_no_module_imports_itself_by_way_of_others():
    """A circle is an error of `graphlib` that lists its modules; imports for types count, too."""
    every = modules()
    del every["kvjax"]  # the front door names everything, lazily
    graph = {name: imports_of(path, every) for name, path in every.items()}
    # A package is imported before its modules, and may import them: `from package import module` needs no edge to it.
    for name, imported in graph.items():
        imported -= {x for x in imported if any(y.startswith(f"{x}.") for y in imported)} | {name}
    graphlib.TopologicalSorter(graph).prepare()


def test_a_model_is_found_by_name_in_a_fresh_interpreter():
    """`kvjax.load` reaches the converters, which stand above it, through its table of resolvers."""
    code = "import kvjax\ntry:\n    kvjax.load('smollm2-135')\nexcept kvjax.KvjaxError as e:\n    print(e)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "did you mean 'smollm2-135m'?" in done.stdout, done.stderr
