"""What `import kvjax` and the command line load: no library that only some calls need, and no method."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = [
    "jax.experimental.pallas",  # Triton behind it; only GPUs run the kernels
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
    methods = {path.stem for path in (ROOT / "kvjax/methods").glob("*.py") if "\n@recipe(" in path.read_text()}
    assert len(methods) > 60
    assert loaded.isdisjoint(f"kvjax.methods.{name}" for name in methods)
    assert not [name for name in loaded if name.startswith(("kvjax.eval", "kvjax.explore", "kvjax.testbed"))]


def test_a_folder_imports_only_from_folders_above_it_in_the_map():
    """Within functions too; the map is the table of CONTRIBUTING."""
    rows = re.findall(r"^\| `kvjax/(\w+)/` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert len(rows) > 7
    upward = []
    for number, folder in enumerate(rows):
        below = tuple(f"kvjax.{name}" for name in rows[number + 1 :])
        for path in (ROOT / "kvjax" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                modules = []
                if isinstance(node, ast.ImportFrom):
                    modules = [node.module or ""]
                elif isinstance(node, ast.Import):
                    modules = [name.name for name in node.names]
                upward += [f"{path}: {module}" for module in modules if module.startswith(below)]
    assert not upward
