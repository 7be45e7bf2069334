"""The page of the field, from field.toml, the catalogue and what was measured on the testbed model."""

from __future__ import annotations

import operator
import tomllib
from pathlib import Path
from typing import Any

import kvjax
from docs.generate.catalogue import recipes
from docs.generate.methods import planned, prose
from experiments.methods import read_results

TABLE = Path(__file__).with_name("field.toml")


def systems() -> dict[str, list[dict[str, Any]]]:
    """The systems of the survey, and those that people use beside it."""
    return tomllib.loads(TABLE.read_text())


def checked(system: dict[str, Any]) -> dict[str, Any]:
    """The system; raises LookupError where it claims a method or a call that there is not, or claims nothing."""
    name = system["name"]
    for method in system.get("methods", ()):
        if method not in recipes():
            raise LookupError(f"{name} claims the method {method!r}, which the catalogue does not have")
    for call in system.get("calls", ()):
        try:
            operator.attrgetter(call.removeprefix("kvjax."))(kvjax)
        except AttributeError:
            raise LookupError(f"{name} claims {call}, which there is not") from None
    if not any(system.get(what) for what in ("methods", "calls", "outside", "slot")):
        raise LookupError(f"{name} has neither a method nor a call, nor a reason")
    return system


def here(system: dict[str, Any]) -> str:
    """What stands for a system."""
    methods = [f"[`{name}`](methods/{name}.md)" for name in system.get("methods", ())]
    calls = [f"`{name}`" for name in system.get("calls", ())]
    if methods or calls:
        return ", ".join(methods + calls)
    if "outside" in system:
        return f"Outside. {system['outside']} Instead: {system['instead']}"
    return f"Not here. What would carry it: {system['slot']}"


def differs(system: dict[str, Any]) -> str:
    """What is not as in the papers or their public code."""
    ours = [recipes()[name] for name in system.get("methods", ())]
    return " ".join(recipe.differs for recipe in ours if recipe.differs) or system.get("differs", "")


def numbers(system: dict[str, Any], found: dict[str, dict[str, Any]]) -> str:
    """Bytes, quality and speed of its first method, beside those of the full cache."""
    ours = [recipes()[name] for name in system.get("methods", ())]
    method = next((recipe.example for recipe in ours if recipe.example in found), None)
    if method is None:
        return " | ".join([""] * 5)
    row, full = found[method], found["full"]
    sizes = (f"{fraction:.1%}" for fraction in planned(method))
    quality = f"{row['recall']:.1%} | {row['code_bits'] - full['code_bits']:+.3f}"
    speed = f"{row['speed']:.2f}x" if "speed" in row else ""
    return f"{' | '.join(sizes)} | {quality} | {speed}"


HEAD = """| {first} | system | what it does | here | device | host | recall | code | speed |
|---|---|---|---|---:|---:|---:|---:|---:|"""


def table(rows: list[dict[str, Any]], found: dict[str, dict[str, Any]], first: str) -> str:
    """One row per system."""
    lines = [HEAD.format(first=first)]
    for system in map(checked, rows):
        title = f"{system['name']}: *{system['title']}*" if "title" in system else system["name"]
        cells = (str(system.get("number", "")), title, system["does"], here(system), numbers(system, found))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def notes(rows: list[dict[str, Any]]) -> str:
    """What differs, system by system."""
    return "\n".join(f"- **{system['name']}**: {prose(differs(system))}" for system in rows if differs(system))


def page() -> str:
    """The page."""
    field, found = systems(), read_results()
    survey, beside = field["survey"], field["beside"]
    works = sum("methods" in system or "calls" in system for system in survey)
    return f"""---
hide: [toc]
---

# The field

{works} of the {len(survey)} systems of the survey are here. Each of the others says why it is not, and what of its
idea can be had.

The numbers are of the first method that is named, at the setting on its page, on the testbed model: bytes of a context
of 2,048 tokens on the device and on the host, as fractions of the exact cache's, both in bfloat16; questions that are
answered exactly; bits per byte of held-out source code above `full`; how many times as fast as `full` it decodes eight
contexts together, in float32 on two CPU cores (`python -m experiments.methods --speed`).

## The survey

{table(survey, found, "no.")}

## What people use beside it

{table(beside, found, " ")}

## What differs from the papers or their public code

{notes([*survey, *beside])}
"""
