"""The site of `make docs`: it builds without a warning, opens from a folder with its search, and asks no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax.registry.registration import FAMILIES
from tests.docs.test_generated_pages import NAMES
from tests.helpers import browser

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
"""Tags that make a browser fetch something from elsewhere; a link that a reader may follow is none of them."""


def files_of(folder: Path) -> dict[str, float]:
    """The files of a folder, with the times at which they changed; no compiled modules."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.stat().st_mtime for path in paths}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built once."""
    folder, before = tmp_path_factory.mktemp("site"), files_of(ROOT / "docs")
    # As `make docs` builds it: with --quiet, mkdocs drops the warnings that --strict would count.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files_of(ROOT / "docs") == before, "a build leaves the pages in git as they are, and adds none"
    return folder


def test_the_site_is_whole_without_a_network(site):
    pages = {str(path.relative_to(site)): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    expected_pages = {"index.html", "contributing.html", "composition.html", "field.html", "equal_bytes.smollm2.html"}
    assert expected_pages | {f"methods/{name}.html" for name in NAMES} <= pages.keys()
    assert 'id="kvjax.generate"' in pages["reference/kvjax.html"]
    assert {name: LOADED.findall(text) for name, text in pages.items() if LOADED.search(text)} == {}


def test_links_to_sources_of_pages_lead_to_these_pages(site):
    text = (site / "generation.html").read_text(encoding="utf-8")
    assert 'href="composition.html"' in text and "composition.py" not in text
    assert 'href="methods/index.html"' in (site / "index.html").read_text(encoding="utf-8")


def test_the_menu_opens_with_writing_a_method_and_groups_methods_by_family(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    menu = text[text.index('class="md-nav md-nav--primary') :]
    links = re.findall(r'class="md-nav__link[^"]*"[^>]*href="([^"#]+)"|href="([^"#]+)" class="md-nav__link', menu)
    order = list(dict.fromkeys(a or b for a, b in links))
    assert order.index("writing_a_method.html") < order.index("generation.html") < order.index("results.html")
    families = [link for link in order if link.startswith("families/")]
    assert len(families) == len(FAMILIES)
    assert order.index("families/exact/index.html") < order.index("methods/full.html") < order.index(families[1])


@pytest.mark.skipif(browser.path() is None, reason="no Chromium; `make` brings one where npm is")
def test_the_search_finds_a_method_on_a_page_that_was_opened_from_a_folder(site, tmp_path):
    with browser.Browser(tmp_path) as page:
        page.open(site / "index.html")
        page.ask("document.querySelector('input.md-search__input').focus()")
        page.call("Input.insertText", text="snapkv window")
        page.press("End")  # the search listens to keys
        page.wait_until("document.querySelectorAll('.md-search-result__link').length > 2")
        links = page.ask("[...document.querySelectorAll('.md-search-result__link')].map(x => x.href)")
        assert any("/methods/snapkv.html" in link for link in links)
        assert all(link.startswith("file://") for link in links)
        assert [c for c in page.complaints() if not c.startswith(("loads file://", "loads data:"))] == []
