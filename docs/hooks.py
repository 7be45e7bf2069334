"""What `make docs` adds to the pages of this folder: the documents of the repository, and the list of methods."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "experiments/README.md": "experiments.md",
    "experiments/LOG.md": "log.md",
}
"""Documents outside this folder -> their pages."""

LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation with a page for each method."""
    methods = next(entry["Methods"] for entry in config.nav if "Methods" in entry)
    found = sorted(path.name for path in Path(config.docs_dir, "methods").glob("*.md"))
    methods += [f"methods/{name}" for name in found if f"methods/{name}" not in methods]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site, with the documents of PAGES and what they link to."""
    for document, page in PAGES.items():
        linked: set[str] = set()
        files.append(File.generated(config, page, content=_on_the_site(document, linked)))
        for path in sorted(linked):
            if files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def _on_the_site(document: str, linked: set[str]) -> str:
    """A document with its links as the site has them; adds to `linked` the files that have no page there."""

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups("")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
        if (ROOT / path).is_dir():
            return text  # a folder has no page
        page = PAGES.get(path, path.removeprefix("docs/"))
        if page == path:
            linked.add(path)
        return f"[{text}]({page}{anchor})"

    return _indented(LINK.sub(link, (ROOT / document).read_text(encoding="utf-8")))


def _indented(text: str) -> str:
    """What belongs to a numbered item is set in by four columns, where GitHub is content with three."""
    text = re.sub(r"^   (?=\S)", "    ", text, flags=re.M)
    return re.sub(r"^(    .*\n)(?=\d+\. )", r"\1\n", text, flags=re.M)


class Brackets(griffe.Extension):
    """Docstrings in which [layer][row] are axes, and no link of Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("][", "]\\[")
