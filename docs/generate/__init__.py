"""The pages of the site that scripts write. `docs/hooks.py` adds them to the site; none of them is in git.

`python -m docs.generate FOLDER` writes them as Markdown, to read without the site.
"""

from __future__ import annotations

from docs.generate import catalogue, composition, equal_bytes, field, methods


def pages() -> dict[str, str | bytes]:
    """Path on the site -> content, of all pages and plots."""
    text: dict[str, str | bytes] = {"composition.md": composition.page(), "field.md": field.page()}
    return text | equal_bytes.pages() | catalogue.pages() | methods.pages()
