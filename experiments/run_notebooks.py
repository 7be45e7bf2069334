"""Runs the notebooks of this folder and stores their outputs; writes the repository's address into them.

python -m experiments.run_notebooks                   runs all, each in a kernel and a folder of its own
python -m experiments.run_notebooks tour              runs one
python -m experiments.run_notebooks --address-only    writes the address into badges and first cells, and runs nothing

REPOSITORY is the one place of the address. Without it, badges open Colab's front page, where one can upload a notebook.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = ""  # "OWNER/NAME" on GitHub, once there is one
BRANCH = "main"

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "notebooks"
COLAB = "https://colab.research.google.com"
BADGE = re.compile(rf"\[!\[[^\]]*\]\({re.escape(COLAB)}/assets/colab-badge\.svg\)\]\([^)]*\)")
ADDRESS = re.compile(r'^KVJAX = "[^"]*"', re.MULTILINE)
RAN = "kvjax_ran"
"""The field of a notebook's metadata that holds the digest of the code which made its outputs."""


def badge(name: str, repository: str = REPOSITORY) -> str:
    """The Markdown of the badge that opens a notebook on Colab."""
    path = f"{FOLDER.relative_to(ROOT).as_posix()}/{name}.ipynb"
    target = f"{COLAB}/github/{repository}/blob/{BRANCH}/{path}" if repository else f"{COLAB}/"
    return f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({target})"


def address(repository: str = REPOSITORY) -> str:
    """The first line of a notebook's code: where a machine without kvjax gets it from."""
    return f'KVJAX = "{f"https://github.com/{repository}" if repository else ""}"'


def write_address(notebook: Any, name: str, repository: str = REPOSITORY) -> None:
    """Writes the badge into the first text of a notebook, and the address into its first code."""
    text = next(cell for cell in notebook.cells if cell.cell_type == "markdown")
    if not BADGE.search(text.source):
        title, rest = text.source.split("\n", 1)
        text.source = f"{title}\n\n{badge(name, repository)}\n{rest}"
    text.source = BADGE.sub(lambda _: badge(name, repository), text.source, count=1)
    code = next(cell for cell in notebook.cells if cell.cell_type == "code")
    code.source = ADDRESS.sub(lambda _: address(repository), code.source, count=1)


def digest(notebook: Any) -> str:
    """A digest of the code of a notebook but for the address, which changes no output."""
    sources = [ADDRESS.sub("KVJAX", cell.source) for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\n\0".join(sources).encode()).hexdigest()[:16]


def run(notebook: Any, folder: Path) -> None:
    """Runs a notebook in a folder, and keeps what its cells print and show, without the names of this machine."""
    from nbclient import NotebookClient

    os.environ |= {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(folder)}}).execute()
    shown = {str(folder): ".", str(ROOT): "kvjax", sys.prefix: "env", str(Path.home()): "~"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        if cell.cell_type == "code":
            cell.outputs = [_hide_names(o, shown) for o in cell.outputs if is_result(o)]
    notebook.metadata[RAN] = digest(notebook)
    notebook.metadata["language_info"] = {"name": "python"}


def is_result(output: Mapping[str, Any]) -> bool:
    """Whether an output is more than progress and warnings: these go to stderr, or end as an empty text."""
    text = output.get("data", {}).get("text/plain", "-")
    return output.get("name") != "stderr" and bool(text.strip()) and "ipywidgets" not in text


def _hide_names(value: Any, shown: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for name, short in shown.items():
            value = value.replace(name, short)
        return value
    if isinstance(value, dict):
        return type(value)({key: _hide_names(item, shown) for key, item in value.items()})
    return [_hide_names(item, shown) for item in value] if isinstance(value, list) else value


def main(argv: Sequence[str] | None = None) -> None:
    import nbformat

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", help="notebooks, without .ipynb (default: all)")
    p.add_argument("--address-only", action="store_true", help="run nothing")
    args = p.parse_args(argv)
    for path in sorted(FOLDER.glob("*.ipynb")):
        if args.names and path.stem not in args.names:
            continue
        notebook = nbformat.read(path, 4)
        write_address(notebook, path.stem)
        if not args.address_only:
            with tempfile.TemporaryDirectory() as folder:
                run(notebook, Path(folder))
        nbformat.write(notebook, path)
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
