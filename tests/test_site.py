"""The site of `make docs`: it builds without a warning, and no page asks the network for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvjax.methods.catalogue import load_all

ROOT = Path(__file__).parents[1]
LOADED = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
"""Tags that make a browser fetch something from elsewhere; a link that a reader may follow is none of them."""


def test_the_site_builds_strictly_and_is_whole_without_a_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {str(path.relative_to(tmp_path)): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    wanted = {"index.html", "contributing.html", *(f"methods/{name}.html" for name in load_all())}
    assert wanted <= pages.keys()
    assert 'id="kvjax.generate"' in pages["reference/kvjax.html"]
    assert {name: LOADED.findall(text) for name, text in pages.items() if LOADED.search(text)} == {}
