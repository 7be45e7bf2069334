"""What `kvjax methods` prints: a line for each method, by family, or all that is known of some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvjax.methods.registry import FAMILIES, OWN_FAMILY, MethodEntry, load_all
from kvjax.methods.strings import find_entry

MORE = "`kvjax methods NAME ...` has parameters, defaults and sources; `a + b` composes methods"


def chosen(names: Sequence[str]) -> list[MethodEntry]:
    """These methods in this order, or all by name; raises KvjaxError with the nearest name for an unknown one."""
    return [find_entry(name) for name in names] or [recipe for _, recipe in sorted(load_all().items())]


def overview(recipes: Sequence[MethodEntry], width: int | None) -> str:
    """A line for each method below its family's; width: columns to which lines are cut, None for whole ones."""
    longest = max(len(recipe.name) for recipe in recipes)
    lines = []
    for family in (*FAMILIES, OWN_FAMILY):
        if members := [recipe for recipe in recipes if recipe.family == family]:
            lines += ["", f"{family}: {FAMILIES[family]}" if family in FAMILIES else family]
            lines += [f"  {recipe.name:{longest}}  {recipe.summary}".rstrip() for recipe in members]
    return "\n".join([*(_cut(line, width) for line in lines[1:]), "", MORE])


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else line[: width - 1] + "…"


def details(recipe: MethodEntry) -> str:
    """Parameters with their defaults, source, family, what differs, and the whole description."""
    given = ", ".join(f"{n}: {p.annotation.__name__}{_default(p)}" for n, p in recipe.parameters.items())
    lines = [f"source: {recipe.source}", f"family: {recipe.family}"]
    lines += [f"differs: {recipe.differs}"] if recipe.differs else []
    lines += recipe.text.splitlines()
    return f"{recipe.name}({given})\n" + "".join(f"    {line}".rstrip() + "\n" for line in lines)


def _default(parameter: Any) -> str:
    return "" if parameter.default is parameter.empty else f" = {parameter.default}"


def as_json(recipe: MethodEntry) -> dict[str, Any]:
    """The same as a JSON object."""
    parameters = {
        name: {"type": p.annotation.__name__, "default": None if p.default is p.empty else p.default}
        for name, p in recipe.parameters.items()
    }
    fields = ("name", "family", "summary", "source", "differs")
    return {**{name: getattr(recipe, name) for name in fields}, "parameters": parameters}
