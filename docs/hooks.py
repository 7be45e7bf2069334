"""Hooks of mkdocs that add the generated pages and the repository's documents to the pages of this folder.

None of these becomes a file of this folder, so a build leaves the working tree unchanged.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # `mkdocs` does not search the current folder for packages

from docs import generate  # noqa: E402
from docs.generate import catalogue, methods  # noqa: E402
from docs.generate.entries import builtin_entries  # noqa: E402

PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "experiments/README.md": "experiments.md",
    "experiments/LOG.md": "log.md",
}
"""Documents outside this folder -> their pages."""
PAGES_OF_LINKS = {
    "README.md": "index.md",
    "docs/generate/composition.py": "composition.md",
    "docs/generate/field.toml": "field.md",
    "experiments/results/equal_bytes.json": "equal_bytes.md",
    "experiments/results/equal_bytes.smollm2.json": "equal_bytes.smollm2.md",
    "kvjax/methods": "methods/index.md",
}
"""Files that pages link to on GitHub -> the pages with their content on the site."""

LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds a menu of all methods by family to the navigation, and the pages of the catalogue after the results."""
    at = next(i for i, entry in enumerate(config.nav) if "Methods" in entry)
    config.nav[at] = {"Methods": methods.menu()}
    results = next(entry["Results"] for entry in config.nav if "Results" in entry)
    results[1:1] = catalogue.menu()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages, the documents of PAGES, and all files that pages link to."""
    for page, content in generate.pages().items():
        files.append(File.generated(config, page, content=content))
    written = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))]
    for document in (*PAGES, *written):
        linked: set[str] = set()
        content = _rewrite_links(document, linked)
        if document in PAGES:
            # Other pages come first in the search: these mention every method.
            meta = "---\nsearch:\n  boost: 0.5\n---\n\n"
            files.append(File.generated(config, PAGES[document], content=meta + content))
        for path in sorted(linked):
            if files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrites the links of a hand-written page for the site."""
    document = f"docs/{page.file.src_uri}"
    return markdown if page.file.generated_by else _rewrite_links(document, set(), markdown)


def _rewrite_links(document: str, linked: set[str], text: str | None = None) -> str:
    """Rewrites the links of a document for the site; adds linked files without a page to `linked`."""

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups("")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
        method = re.fullmatch(r"kvjax/methods/(\w+)\.py", path)
        if path.startswith("docs/") and path not in PAGES_OF_LINKS:
            page = path.removeprefix("docs/")
        elif method is not None and method[1] in builtin_entries():
            page = f"methods/{method[1]}.md"
        elif path in PAGES or path in PAGES_OF_LINKS:
            page = PAGES.get(path) or PAGES_OF_LINKS[path]
        elif (ROOT / path).is_dir():
            return text  # a folder has no page
        elif (ROOT / path).is_file():
            linked.add(path)
            page = path
        else:
            return found[0]  # code that looks like a link
        return f"[{text}]({page}{anchor})"

    text = (ROOT / document).read_text(encoding="utf-8") if text is None else text
    text = LINK.sub(link, text)
    # mkdocs needs four columns of indentation in a numbered item, GitHub three.
    text = re.sub(r"^   (?=\S)", "    ", text, flags=re.M)
    return re.sub(r"^(    .*\n)(?=\d+\. )", r"\1\n", text, flags=re.M)


class Docstrings(griffe.Extension):
    """Adapts docstrings to the site: `[layer][row]` are axes, not a link, and `Example:` starts a Python session."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value.replace("][", "]\\[")
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)
