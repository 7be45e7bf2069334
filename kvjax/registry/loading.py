"""Loads users' methods from a file, from a module, or from the entry points of installed packages."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import os
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path

from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.registry.registration import REGISTRY, MethodEntry, import_builtin_methods, is_builtin, source_file
from kvjax.utils.files import expand_user

ENTRY_POINT_GROUP = "kvjax.methods"
"""The group of entry points in which an installed package names its methods."""

_loaded: dict[Path, types.ModuleType] = {}  # the module of each file, whose name says what was in it
_LOCK = threading.RLock()  # reentrant: a package may ask for other methods while its own are loading


def load_methods(source: str | os.PathLike[str]) -> tuple[str, ...]:
    """Loads methods of your own, so that their names work in strings wherever those of kvjax do.

    A file is run as a module of its own, and again when it was edited: its new methods replace those that it defined
    before. The files that it imports are not read again, as everywhere in Python. The folder of the file, or the
    current folder for a module, goes to the end of `sys.path`, so that it may import the files next to it.

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
    path = expand_user(text)
    # A package's folder may be given as a module's name: it is no path to a file.
    is_file = text.endswith(".py") or os.sep in text or (path.exists() and not (path / "__init__.py").exists())
    problem = ""
    if is_file and not (path.is_file() and path.suffix == ".py"):
        problem = "is no Python file" if path.exists() else "does not exist"
    elif not is_file and not all(map(str.isidentifier, text.split("."))):
        problem = "is neither a file nor the name of a module"
    if problem:
        raise KvjaxError(
            f"{text!r:.80} {problem}; give a file such as my_method.py, or a module such as my_package.methods"
        )
    # At the end, so that a user's file named like a module of Python or JAX does not shadow it.
    if (folder := str(path.resolve().parent if is_file else Path.cwd())) not in sys.path:
        sys.path.append(folder)
    loaded = False
    try:
        module = _load_file(path.resolve()) if is_file else importlib.import_module(text)
        loaded = True
    except (Exception, SystemExit) as e:
        raise KvjaxError(_explain(e, text, is_file)) from e
    finally:
        if not loaded:  # a file that fails halfway must not leave half of its methods registered
            REGISTRY.clear()
            REGISTRY.update(before)
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
        while waiting := _waiting_entry_points():
            entry, problem = waiting.pop(0), ""
            try:
                value = entry.load()
                if isinstance(value, types.ModuleType):
                    problem = "" if _find_methods(value, REGISTRY) else "the module defines no method"
                elif not any(method.make is value for method in REGISTRY.values()):
                    problem = "it is neither a module nor a function below @register_method"
            except Exception as e:
                problem = _first_line(e)
            if problem:
                package = f" of {entry.dist.name}" if entry.dist else ""
                warnings.warn(
                    f"the entry point {entry.name} = {entry.value}{package} fails: {problem}; "
                    "repair or uninstall that package",
                    KvjaxWarning,
                    stacklevel=2,
                )
    return REGISTRY


@functools.cache  # one list, from which each entry point is taken as its loading begins
def _waiting_entry_points() -> list[importlib.metadata.EntryPoint]:
    """The entry points of the group that were not loaded yet."""
    return list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def _load_file(path: Path) -> types.ModuleType:
    """Runs a file as a module, unless it is the one that was loaded last."""
    source = path.read_bytes()
    # The name is that of the content: an edited file is another module, and another process finds what was pickled.
    name = f"{path.stem.replace('.', '_')}_{hashlib.sha256(source).hexdigest()[:16]}"
    if path in _loaded and _loaded[path].__name__ == name:
        return _loaded[path]
    for method in [method for method, entry in REGISTRY.items() if source_file(entry.make) == path]:
        del REGISTRY[method]  # the edited file may have renamed its methods
    module = types.ModuleType(name)
    module.__file__, module.__package__ = str(path), ""
    sys.modules[name] = module  # dataclasses and pickle look up their module there
    try:
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    _loaded[path] = module
    return module


def _find_methods(module: types.ModuleType, before: dict[str, MethodEntry]) -> tuple[str, ...]:
    """The names of users' methods that a module defines or imports, or that were registered since `before`."""
    values, file = {id(value) for value in vars(module).values()}, getattr(module, "__file__", None)
    return tuple(
        name
        for name, entry in REGISTRY.items()
        if not is_builtin(entry.make)
        and (
            f"{entry.make.__module__}.".startswith(f"{module.__name__}.")
            or (file is not None and source_file(entry.make) == Path(file).resolve())
            or id(entry.make) in values
            or entry is not before.get(name)
        )
    )


def _explain(error: BaseException, source: str, is_file: bool) -> str:
    """Describes in one line where and why a file or module failed."""
    if not is_file and isinstance(error, ModuleNotFoundError) and f"{source}.".startswith(f"{error.name}."):
        return f"there is neither a file nor a module {source}; for example my_method.py"
    # The last line of the user's, whatever kvjax and Python's import did below it.
    machinery = ("<", str(Path(__file__).parent.parent), os.path.dirname(importlib.__file__))
    frames = [x for x in traceback.extract_tb(error.__traceback__) if not x.filename.startswith(machinery)]
    frames = [x for x in frames if x.filename == str(expand_user(source).resolve())] or frames
    file, line = (frames[-1].filename, frames[-1].lineno) if frames else ("", None)
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno
    where = source if file in ("", str(expand_user(source).resolve())) else f"{source}: {os.path.relpath(file)}"
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
