"""Loads users' methods from a file, from a module, or from the entry points of installed packages."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path

from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.registry.registration import REGISTRY, MethodEntry, import_builtin_methods, is_builtin, source_file

ENTRY_POINT_GROUP = "kvjax.methods"
"""The group of entry points in which an installed package names its methods."""

_DIGESTS: dict[Path, str] = {}  # SHA-256 of each loaded file, so that an edited file is loaded again
_STARTED: set[importlib.metadata.EntryPoint] = set()
_LOCK = threading.RLock()  # reentrant: a package may ask for other methods while its own are loading


def load_methods(source: str | os.PathLike[str]) -> tuple[str, ...]:
    """Loads methods of your own, so that their names work in strings wherever those of kvjax do.

    A file that was loaded before is loaded again only if it was edited. The folder of the file, or the current folder
    for a module, goes to the end of `sys.path`, so that it may import the files next to it.

    Args:
      source: a Python file such as "my_method.py", or a module such as "my_package.methods".

    Returns:
      The names of the methods that are defined there.

    Raises:
      KvjaxError: the file or module is missing, fails (the message has the line), or defines no method.

    Example:
      >>> kvjax.method_api.load_methods("my_method.py")
      ('value_norm',)
    """
    text, before = os.fspath(source), dict(load_all())
    path = Path(text)
    # A package's folder may be given as a module's name: it is no path to a file.
    is_file = text.endswith(".py") or os.sep in text or (path.exists() and not (path / "__init__.py").exists())
    try:
        module = _load_file(path) if is_file else _import_module(text)
    except BaseException:
        # A file that fails halfway must not leave half of its methods registered.
        REGISTRY.clear()
        REGISTRY.update(before)
        raise
    if names := _find_methods(module, before):
        return names
    raise KvjaxError(
        f"{text} defines no method; one is a function below `@register_method` that returns a kvjax.Method, with "
        "`register_method` from kvjax.method_api"
    )


def load_all() -> dict[str, MethodEntry]:
    """Imports and returns all methods: kvjax's, installed packages', and the user's own.

    The entry points of packages are loaded once; one that fails gives a KvjaxWarning.
    """
    import_builtin_methods()
    with _LOCK:
        for entry in _entry_points():
            if entry in _STARTED:
                continue
            _STARTED.add(entry)
            try:
                value = entry.load()
                if isinstance(value, types.ModuleType):
                    if not _find_methods(value, REGISTRY):
                        raise KvjaxError("the module defines no method")
                elif not any(method.make is value for method in REGISTRY.values()):
                    raise KvjaxError("it is neither a module nor a function below @register_method")
            except Exception as e:
                package = f" of {entry.dist.name}" if entry.dist else ""
                warnings.warn(
                    f"the entry point {entry.name} = {entry.value}{package} fails: {_first_line(e)}; "
                    "repair or uninstall that package",
                    KvjaxWarning,
                    stacklevel=2,
                )
    return REGISTRY


@functools.cache
def _entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    """The entry points of the group, cached because a search of all installed packages is slow."""
    return tuple(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file() or path.suffix != ".py":
        what = "is a folder" if path.is_dir() else "is no Python file" if path.is_file() else "does not exist"
        raise KvjaxError(f"{path} {what}; give a file such as my_method.py, or a module such as my_package.methods")
    given, path = path, path.resolve()
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    # The file may have been imported under any name, `__main__` included.
    known = None
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.basename(file) == path.name and Path(file).resolve() == path:
            known = module
            break
    if known and _DIGESTS.get(path, digest) == digest:
        return known
    for name in [name for name, entry in REGISTRY.items() if source_file(entry.make) == path]:
        del REGISTRY[name]  # the edited file may have renamed its methods
    name = known.__name__ if known else _module_name(path)
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None  # it is None only without a loader
    module = importlib.util.module_from_spec(spec)
    _extend_path(path.parent)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        # The loader itself would use a compiled file, which notices an edit only by its second and its size.
        exec(loader.source_to_code(source, str(path)), module.__dict__)
    except BaseException as e:
        sys.modules.pop(name) if known is None else sys.modules.update({name: known})
        if isinstance(e, KeyboardInterrupt):
            raise
        raise KvjaxError(_explain(e, given, path)) from e
    _DIGESTS[path] = digest
    return module


def _module_name(path: Path) -> str:
    """The file's name as `import` would have it, or a new name where that is taken."""
    name = path.stem
    taken = name in sys.modules
    if not taken and name.isidentifier():
        found = importlib.util.find_spec(name)
        taken = found is not None and (found.origin is None or Path(found.origin).resolve() != path)
    name = f"loaded_{name}" if taken else name
    while name in sys.modules:  # two files of one name
        name += "_"
    return name


def _import_module(name: str) -> types.ModuleType:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        raise KvjaxError(f"{name!r:.80} is neither a file nor the name of a module; give a file such as my_method.py")
    _extend_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if f"{name}.".startswith(f"{e.name}."):
            near = f"; there is a file {name}.py: give that" if Path(f"{name}.py").is_file() else ""
            raise KvjaxError(f"there is neither a file nor a module {name}{near}; for example my_method.py") from None
        raise KvjaxError(_explain(e, name, None)) from e
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        raise KvjaxError(_explain(e, name, None)) from e


def _extend_path(folder: Path) -> None:
    # At the end, so that a user's file named like a module of Python or JAX does not shadow it.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _find_methods(module: types.ModuleType, before: dict[str, MethodEntry]) -> tuple[str, ...]:
    """The names of users' methods that a module defines or imports, or that were registered since `before`."""
    values = {id(value) for value in vars(module).values()}
    return tuple(
        name
        for name, entry in REGISTRY.items()
        if not is_builtin(entry.make)
        and (
            f"{entry.make.__module__}.".startswith(f"{module.__name__}.")
            or id(entry.make) in values
            or entry is not before.get(name)
        )
    )


def _explain(error: BaseException, source: str | Path, path: Path | None) -> str:
    """Describes in one line where and why a file or module failed; `path` is None for a module."""
    machinery = ("<", str(Path(__file__).parent.parent), os.path.dirname(importlib.__file__))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if (frame.filename == str(path) if path else not frame.filename.startswith(machinery))
    ]
    where, line = str(source), frames[-1].lineno if frames else None
    if frames and not path:
        where += f": {os.path.relpath(frames[-1].filename)}"
    if isinstance(error, SyntaxError) and error.filename:
        same = path is not None and Path(error.filename) == path
        where, line = (where if same else f"{source}: {os.path.relpath(error.filename)}"), error.lineno
    where = f"{where}, line {line}" if line else where
    if isinstance(error, SystemExit):
        return f"{where}: it ends the program as it is loaded; put that below `if __name__ == '__main__':`"
    remedy = ""
    if isinstance(error, ImportError) and "relative import" in str(error):
        remedy = "; the file is a part of a package: give its module's name, such as my_package.methods"
    return f"{where}: {_first_line(error)}{remedy}"


def _first_line(error: BaseException) -> str:
    line = (str(error).splitlines() or [""])[0]
    if isinstance(error, KvjaxError):
        return line
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else line}"
