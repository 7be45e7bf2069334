"""The text of `kvjax methods --api`: the names that a method is written with, by component, and their contracts."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvjax.errors import KvjaxError
from kvjax.utils.arguments import suggest_name

HINT = "`kvjax methods --api NAME ...` prints what a name is given and what it must return"


class ApiName(NamedTuple):
    """A name of `kvjax.method_api`."""

    name: str
    component: str  # the heading that it stands below
    meaning: str  # in one line


def list_names(api: types.ModuleType) -> list[ApiName]:
    """Reads names, headings and meanings off the module's list of names and its comments, which hold them once."""
    listed = re.search(r"^\w+ = \[\n(.*?)^\]", inspect.getsource(api), re.M | re.S)
    assert listed is not None
    names, component = [], ""
    for line in listed[1].splitlines():
        if heading := re.fullmatch(r"    # (.+)", line):
            component = heading[1]
        elif entry := re.fullmatch(r'    "(\w+)",(?:  # (.+))?', line):
            names.append(ApiName(entry[1], component, entry[2] or ""))
    return names


def find_names(api: types.ModuleType, names: Sequence[str]) -> list[ApiName]:
    """Returns the entries of some names; raises KvjaxError for an unknown one."""
    known = {entry.name: entry for entry in list_names(api)}
    for name in names:
        if name not in known:
            raise KvjaxError(
                f"kvjax.method_api has no name {name!r:.60}{suggest_name(name, known)}; "
                "`kvjax methods --api` lists all of them"
            )
    return [known[name] for name in names]


def format_names(entries: Sequence[ApiName]) -> str:
    """A line for each name below its component's."""
    longest = max(len(entry.name) for entry in entries)
    lines, component = [], None
    for entry in entries:
        if entry.component != component:
            lines += ["", component := entry.component]
        lines.append(f"  {entry.name:{longest}}  {entry.meaning}".rstrip())
    return "\n".join([*lines[1:], "", HINT])


def format_contract(api: types.ModuleType, entry: ApiName) -> str:
    """A name's meaning, and its source without the bodies of functions: signatures, docstrings, fields, comments."""
    value = getattr(api, entry.name)
    value = inspect.unwrap(value) if callable(value) else value
    if inspect.ismodule(value):
        contract = _describe_module(value)
    elif inspect.isclass(value) or inspect.isfunction(value):
        try:
            contract = _without_bodies(textwrap.dedent(inspect.getsource(value)))
        except (OSError, TypeError):  # a class of another package that has no source
            contract = f"{value.__module__}.{value.__qualname__}"
    else:
        contract = f"{entry.name} = {value!r}"
    return f"{entry.name} ({entry.component}): {entry.meaning}\n\n{textwrap.indent(contract, '    ')}\n"


def _without_bodies(source: str) -> str:
    """Removes the code of functions below their docstrings, and private functions, from the source of a definition."""
    lines = source.splitlines()
    (definition,) = ast.parse(source).body
    functions = definition.body if isinstance(definition, ast.ClassDef) else [definition]
    for node in reversed([x for x in functions if isinstance(x, ast.FunctionDef)]):
        first = min(x.lineno for x in (node, *node.decorator_list))
        if node.name.startswith("_") and node.name != "__call__":
            del lines[first - 1 : node.end_lineno]
        elif ast.get_docstring(node) is not None:
            del lines[node.body[0].end_lineno : node.end_lineno]
        else:
            del lines[node.body[0].lineno - 1 : node.end_lineno]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip()


def _describe_module(module: Any) -> str:
    """A module's docstring, and a line for each of its public functions and classes."""
    tree = ast.parse(inspect.getsource(module))
    lines = [ast.get_docstring(tree) or "", ""]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            lines.append(f"{node.name}: {(ast.get_docstring(node) or '').partition(chr(10))[0]}")
    return "\n".join(lines).strip()
