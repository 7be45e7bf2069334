"""Writes the pages as Markdown: `python -m docs.generate FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

from docs.generate import pages
from kvjax.utils.files import make_folder


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    p = argparse.ArgumentParser(description="Writes the generated pages of the site as Markdown.")
    p.add_argument("folder", type=Path, help="where to, such as out/pages")
    folder = make_folder(p.parse_args(argv).folder)
    for path, content in pages().items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


if __name__ == "__main__":
    main()
