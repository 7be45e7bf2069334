"""What `make docs` adds to the pages of this folder: the generated pages, and the documents of the repository.

None of them is a file of this folder, so a build leaves the working tree as it was.
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
sys.path.insert(0, str(ROOT))  # `mkdocs` does not look for packages in the folder where it runs

from docs import generate  # noqa: E402
from docs.generate import methods  # noqa: E402
from docs.generate.entries import builtin_entries  # noqa: E402

PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "experiments/README.md": "experiments.md",
    "experiments/LOG.md": "log.md",
}
"""Documents outside this folder -> their pages."""
STANDS_FOR = {
    "README.md": "index.md",
    "docs/generate/composition.py": "composition.md",
    "docs/generate/field.toml": "field.md",
    "experiments/results/equal_bytes.json": "equal_bytes.md",
    "experiments/results/equal_bytes.smollm2.json": "equal_bytes.smollm2.md",
    "kvjax/methods": "methods/index.md",
}
"""What pages link to because it is in git -> the page that shows it on the site."""

LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation with the families of methods, and in each a page for each method."""
    at = next(i for i, entry in enumerate(config.nav) if "Methods" in entry)
    config.nav[at] = {"Methods": methods.menu()}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site: the generated pages, the documents of PAGES, and what pages link to."""
    for page, content in generate.pages().items():
        files.append(File.generated(config, page, content=content))
    written = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))]
    for document in (*PAGES, *written):
        linked: set[str] = set()
        content = _on_the_site(document, linked)
        if document in PAGES:
            # Other pages come first in the search: these mention every method.
            meta = "---\nsearch:\n  boost: 0.5\n---\n\n"
            files.append(File.generated(config, PAGES[document], content=meta + content))
        for path in sorted(linked):
            if files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """A page that is written by hand, with its links as the site has them."""
    document = f"docs/{page.file.src_uri}"
    return markdown if page.file.generated_by else _on_the_site(document, set(), markdown)


def _on_the_site(document: str, linked: set[str], text: str | None = None) -> str:
    """A document with its links as the site has them; adds to `linked` the files that have no page there."""

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups("")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
        method = re.fullmatch(r"kvjax/methods/(\w+)\.py", path)
        if path.startswith("docs/") and path not in STANDS_FOR:
            page = path.removeprefix("docs/")
        elif method is not None and method[1] in builtin_entries():
            page = f"methods/{method[1]}.md"
        elif path in PAGES or path in STANDS_FOR:
            page = PAGES.get(path) or STANDS_FOR[path]
        elif (ROOT / path).is_dir():
            return text  # a folder has no page
        elif (ROOT / path).is_file():
            linked.add(path)
            page = path
        else:
            return found[0]  # code that looks like a link
        return f"[{text}]({page}{anchor})"

    text = (ROOT / document).read_text(encoding="utf-8") if text is None else text
    return _indented(LINK.sub(link, text))


def _indented(text: str) -> str:
    """What belongs to a numbered item is set in by four columns, where GitHub is content with three."""
    text = re.sub(r"^   (?=\S)", "    ", text, flags=re.M)
    return re.sub(r"^(    .*\n)(?=\d+\. )", r"\1\n", text, flags=re.M)


class Docstrings(griffe.Extension):
    """Docstrings as the site reads them: [layer][row] are axes and no link, and an example is a session of Python."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value.replace("][", "]\\[")
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)
