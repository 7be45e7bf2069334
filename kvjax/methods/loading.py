"""Methods of one's own: loaded from a file, from a module, or from the entry points of installed packages."""

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
from kvjax.methods.registry import REGISTRY, MethodEntry, is_builtin, load_all, source_file

ENTRY_POINTS = "kvjax.methods"
"""The group of entry points in which an installed package names its methods."""

_DIGESTS: dict[Path, str] = {}  # of the files that were loaded, so that a file that was edited is loaded again
_BEGUN: set[importlib.metadata.EntryPoint] = set()
_LOCK = threading.RLock()  # another thread waits for all methods; this one may ask for some while it loads others


def load_methods(source: str | os.PathLike[str]) -> tuple[str, ...]:
    """Loads methods of your own, whose names then work in strings wherever those of kvjax do.

    A file that was loaded before is loaded again only if it was edited. The folder of a file, or the current one
    for a module, is put at the end of `sys.path`, so that it may import its neighbours.

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
    try:
        module = _load_file(Path(text)) if _names_file(text) else _import(text)
    except BaseException:
        REGISTRY.clear()  # nothing of what failed stays
        REGISTRY.update(before)
        raise
    if names := _names(module, before):
        return names
    raise KvjaxError(
        f'{text} defines no method; one is a function below `@recipe("where it comes from")` that returns a '
        "kvjax.Method, with `recipe` from kvjax.method_api"
    )


def load_entry_points() -> None:
    """Loads the methods that installed packages name, once; one that fails is told as a KvjaxWarning."""
    with _LOCK:
        for entry in _entry_points():
            if entry in _BEGUN:
                continue
            _BEGUN.add(entry)
            try:
                _load_entry_point(entry)
            except Exception as e:
                package = f" of {entry.dist.name}" if entry.dist else ""
                warnings.warn(
                    f"the entry point {entry.name} = {entry.value}{package} fails: {_first_line(e)}; "
                    "repair or uninstall that package",
                    KvjaxWarning,
                    stacklevel=2,
                )


@functools.cache
def _entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    """Those of this group; looking through all installed packages takes longer than a method's string."""
    return tuple(importlib.metadata.entry_points(group=ENTRY_POINTS))


def _load_entry_point(entry: importlib.metadata.EntryPoint) -> None:
    found = entry.load()
    if isinstance(found, types.ModuleType):
        if not _names(found, REGISTRY):
            raise KvjaxError("the module defines no method")
    elif not any(recipe.make is found for recipe in REGISTRY.values()):
        raise KvjaxError("it is neither a module nor a function below @recipe")


def _names_file(text: str) -> bool:
    """Whether a text is meant as a path rather than as a dotted name."""
    path = Path(text)
    return text.endswith(".py") or os.sep in text or (path.exists() and not (path / "__init__.py").exists())


def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file() or path.suffix != ".py":
        what = "is a folder" if path.is_dir() else "is no Python file" if path.is_file() else "does not exist"
        raise KvjaxError(f"{path} {what}; give a file such as my_method.py, or a module such as my_package.methods")
    given, path = path, path.resolve()
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    known = _find_module(path)
    if known and _DIGESTS.get(path, digest) == digest:
        return known
    for name in [name for name, recipe in REGISTRY.items() if source_file(recipe.make) == path]:
        del REGISTRY[name]  # what was edited may have another name
    name = known.__name__ if known else _module_name(path)
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None  # with a loader there is one
    module = importlib.util.module_from_spec(spec)
    _extend_path(path.parent)
    sys.modules[name] = module  # dataclasses look for their module there
    try:
        # Not by the loader: its compiled files tell an edit only by the second and the size.
        exec(loader.source_to_code(source, str(path)), module.__dict__)
    except BaseException as e:
        sys.modules.pop(name) if known is None else sys.modules.update({name: known})
        if isinstance(e, KeyboardInterrupt):
            raise
        raise KvjaxError(_explain(e, given, path)) from e
    _DIGESTS[path] = digest
    return module


def _find_module(path: Path) -> types.ModuleType | None:
    """The module that is this file, under whatever name; `__main__`, too."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.basename(file) == path.name and Path(file).resolve() == path:
            return module
    return None


def _module_name(path: Path) -> str:
    """The file's own name, as `import` would have it, unless that is another module's."""
    name = path.stem
    taken = name in sys.modules
    if not taken and name.isidentifier():
        found = importlib.util.find_spec(name)
        taken = found is not None and (found.origin is None or Path(found.origin).resolve() != path)
    name = f"loaded_{name}" if taken else name
    while name in sys.modules:  # two files of one name
        name += "_"
    return name


def _import(name: str) -> types.ModuleType:
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
    # At the end: a file of the user's called like a module of Python or of JAX must not stand in for it.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _names(module: types.ModuleType, before: dict[str, MethodEntry]) -> tuple[str, ...]:
    """The methods that a module defines or imports, or that came with it."""
    own = {name: recipe for name, recipe in REGISTRY.items() if not is_builtin(recipe.make)}
    values = {id(value) for value in vars(module).values()}

    def belongs(name: str, recipe: MethodEntry) -> bool:
        inside = f"{recipe.make.__module__}.".startswith(f"{module.__name__}.")
        return inside or id(recipe.make) in values or recipe is not before.get(name)

    return tuple(name for name, recipe in own.items() if belongs(name, recipe))


def _explain(error: BaseException, source: str | Path, path: Path | None) -> str:
    """Where and why a file or module failed, in one line; path: of the file, if it is one."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename, path)]
    where, line = (str(source), frames[-1].lineno) if path and frames else (str(source), None)
    if not path and frames:
        where, line = f"{source}: {os.path.relpath(frames[-1].filename)}", frames[-1].lineno
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


def _is_users(file: str, path: Path | None) -> bool:
    """Whether a line of a traceback is in the file, or, of a module, neither kvjax's nor Python's machinery."""
    if path is not None:
        return file == str(path)
    return not file.startswith(("<", str(Path(__file__).parent.parent), os.path.dirname(importlib.__file__)))


def _first_line(error: BaseException) -> str:
    said = (str(error).splitlines() or [""])[0]
    if isinstance(error, KvjaxError):
        return said
    said = error.msg if isinstance(error, SyntaxError) else said
    return f"{type(error).__name__}: {said}"
