"""The text of `kvjax methods`: a line for each method, by family, or everything that is known of some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvjax.registry.registration import FAMILIES, OWN_FAMILY, MethodEntry

HINT = "`kvjax methods NAME ...` has parameters, defaults and references; `a + b` composes methods"


def format_overview(entries: Sequence[MethodEntry], width: int | None) -> str:
    """A line for each method below its family's; `width` is the columns to which lines are cut, None for no cut."""
    longest = max(len(entry.name) for entry in entries)
    lines = []
    for family in (*FAMILIES, OWN_FAMILY):
        if members := [entry for entry in entries if entry.family == family]:
            lines += ["", f"{family}: {FAMILIES[family]}" if family in FAMILIES else family]
            lines += [f"  {entry.name:{longest}}  {entry.docs.summary}".rstrip() for entry in members]
    if width is not None:
        lines = [line if len(line) <= width else line[: width - 1] + "…" for line in lines]
    return "\n".join([*lines[1:], "", HINT])


def format_details(entry: MethodEntry) -> str:
    """A method's parameters with types, defaults and meanings, its family, and the sections of its docstring."""
    docs, defaults = entry.docs, {name: f" = {value}" for name, value in entry.defaults.items()}
    types = {name: p.annotation.__name__ for name, p in entry.parameters.items()}
    signature = ", ".join(f"{name}: {kind}{defaults.get(name, '')}" for name, kind in types.items())
    sections = {"reference": docs.reference, "family": entry.family, "formula": docs.formula, "differs": docs.differs}
    lines = [docs.summary, *docs.description.splitlines()]
    lines += [f"{title}: {text}" for title, text in sections.items() if text]
    lines += [f"  {name}: {meaning}" for name, meaning in entry.meanings.items() if meaning]
    return f"{entry.name}({signature})\n" + "".join(f"    {line}\n" for line in lines if line)


def to_json(entry: MethodEntry) -> dict[str, Any]:
    """The parameters, family and docstring sections of a method, as a JSON object."""
    docs, defaults, meanings = entry.docs, entry.defaults, entry.meanings
    parameters = {
        name: {"type": p.annotation.__name__, "default": defaults.get(name), "meaning": meanings[name]}
        for name, p in entry.parameters.items()
    }
    sections = {"summary": docs.summary, "formula": docs.formula, "differs": docs.differs, "source": docs.reference}
    return {"name": entry.name, "family": entry.family, **sections, "parameters": parameters}
