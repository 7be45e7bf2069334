"""The source files of users' methods, as they travel to a machine that may not have them.

A method of `--load FILE` is known by its name where that file was loaded, and nowhere else. What travels is the text
of the file and of the modules beside it that it imported, and there the file is loaded as it was here.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvjax.errors import KvjaxError
from kvjax.registry.loading import load_methods
from kvjax.registry.registration import is_builtin, source_file
from kvjax.registry.strings import find_entry, split_methods

INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages, which every machine has to install for itself."""


@dataclasses.dataclass(frozen=True)
class MethodSources:
    """The texts of one folder, and what to load of it."""

    files: dict[str, bytes]  # by path within the folder
    load: tuple[str, ...]  # for `load_methods`: paths within the folder, or dotted names of modules


def pack_sources(methods: Iterable[str]) -> list[MethodSources]:
    """Collects the sources of the users' methods in some method strings.

    Args:
      methods: method strings; those of kvjax and of installed packages have nothing to travel.

    Raises:
      KvjaxError: a method was registered in a notebook or a script, which no other process can import.
    """
    entries = {part.name: find_entry(part.name) for text in methods for part in split_methods(text)}
    roots: dict[Path, set[str]] = {}
    for name, entry in entries.items():
        module, file = entry.make.__module__, source_file(entry.make)
        if is_builtin(entry.make) or (file is not None and set(INSTALLED) & set(file.parts)):
            continue
        if module == "__main__" or file is None:
            raise KvjaxError(
                f"{name} is defined in a notebook or a script, which no other process can load; move it to a file and "
                f"load that, as in kvjax.method_api.load_methods('{name}.py')"
            )
        # A module of a package is imported by its dotted name, from the folder above the outermost package. What
        # `load_methods` has run as a file has no import spec.
        is_imported = sys.modules[module].__spec__ is not None
        if is_imported and ((file.parent / "__init__.py").exists() or "." in module):
            roots.setdefault(file.parents[module.count(".") + (file.stem == "__init__")], set()).add(module)
        else:
            roots.setdefault(file.parent, set()).add(file.name)
    packed = []
    for root, names in roots.items():
        files = {}
        for module in list(sys.modules.values()):
            path = Path(file).resolve() if isinstance(file := getattr(module, "__file__", None), str) else None
            is_own = path is not None and path.suffix == ".py" and path.is_relative_to(root)
            # A user's file may lie beside a clone of kvjax, or above a virtual environment.
            is_foreign = module.__name__.partition(".")[0] in ("kvjax", "checkpoints_convert")
            if path is not None and is_own and not is_foreign and not set(INSTALLED) & set(path.parts):
                files[str(path.relative_to(root))] = path.read_bytes()
        packed.append(MethodSources(files, tuple(sorted(names))))
    return packed


def load_sources(packed: Iterable[MethodSources]) -> None:
    """Writes the sources into new folders and loads their methods; raises KvjaxError as `load_methods` does."""
    for sources in packed:
        folder = Path(tempfile.mkdtemp(prefix="kvjax-methods-"))  # as long as the process: a traceback may read it
        for relative, text in sources.files.items():
            path = folder / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        sys.path.append(str(folder))
        for name in sources.load:
            load_methods(folder / name if name.endswith(".py") else name)
