"""The page of the field: the systems of field.toml, and what kvjax has of each."""

from __future__ import annotations

import operator
import tomllib
from pathlib import Path
from typing import Any

import kvjax
from docs.generate.entries import builtin_entries
from docs.generate.methods import plan_context, prose
from experiments.methods import read_results

TABLE = Path(__file__).with_name("field.toml")
NUM_NUMBERS = 5  # columns of `numbers`


def load_systems() -> dict[str, list[dict[str, Any]]]:
    """The systems of the survey, and other systems in use."""
    return tomllib.loads(TABLE.read_text())


def check_system(system: dict[str, Any]) -> None:
    """Raises LookupError for a system that claims an unknown method or call, or claims nothing."""
    name = system["name"]
    for method in system.get("methods", ()):
        if method not in builtin_entries():
            raise LookupError(f"{name} claims the method {method!r}, which kvjax does not have")
    for call in system.get("calls", ()):
        try:
            operator.attrgetter(call.removeprefix("kvjax."))(kvjax)
        except AttributeError:
            raise LookupError(f"{name} claims {call}, which kvjax does not have") from None
    if not any(system.get(key) for key in ("methods", "calls", "outside", "component")):
        raise LookupError(f"{name} has neither a method nor a call, nor a reason")


def implementation(system: dict[str, Any]) -> str:
    """The methods and calls that implement a system, or the reason why none does."""
    methods = [f"[`{name}`](methods/{name}.md)" for name in system.get("methods", ())]
    calls = [f"`{name}`" for name in system.get("calls", ())]
    if methods or calls:
        return ", ".join(methods + calls)
    if "outside" in system:
        return f"Outside. {system['outside']} Instead: {system['instead']}"
    return f"Not here. It would need: {system['component']}"


def differences(system: dict[str, Any]) -> str:
    """The differences from the papers or their public code."""
    return " ".join(builtin_entries()[name].docs.differs for name in system.get("methods", ())) or system.get(
        "differs", ""
    )


def numbers(system: dict[str, Any], results: dict[str, dict[str, Any]]) -> str:
    """Bytes, quality and speed of a system's first method, as cells."""
    examples = [builtin_entries()[name].example for name in system.get("methods", ())]
    method = next((example for example in examples if example in results), None)
    if method is None:
        return " | ".join([""] * NUM_NUMBERS)
    row, full = results[method], results["full"]
    planned = plan_context(method)
    sizes = (f"{part:.1%}" for part in (planned.fraction_of_full, planned.host_fraction_of_full))
    quality = f"{row['recall']:.1%} | {row['code_bits'] - full['code_bits']:+.3f}"
    speed = f"{row['speed']:.2f}x" if "speed" in row else ""
    return f"{' | '.join(sizes)} | {quality} | {speed}"


def table(systems: list[dict[str, Any]], results: dict[str, dict[str, Any]], first_column: str) -> str:
    """A table with a row per system."""
    lines = [
        f"| {first_column} | system | what it does | here | device | host | recall | code | speed |",
        "|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for system in systems:
        check_system(system)
        title = f"{system['name']}: *{system['title']}*" if "title" in system else system["name"]
        cells = (str(system.get("number", "")), title, system["does"], implementation(system), numbers(system, results))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """The page."""
    systems, results = load_systems(), read_results()
    survey, others = systems["survey"], systems["others"]
    num_here = sum("methods" in system or "calls" in system for system in survey)
    differing = [(system["name"], differences(system)) for system in (*survey, *others)]
    notes = "\n".join(f"- **{name}**: {prose(text)}" for name, text in differing if text)
    return f"""---
hide: [toc]
---

# The field

{num_here} of the {len(survey)} systems of the survey are here. Each of the others says why it is not, and what of its
idea can be had.

The numbers are of the first method that is named, at the setting on its page, on the testbed model: bytes of a context
of 2,048 tokens on the device and on the host, as fractions of the exact cache's, both in bfloat16; questions that are
answered exactly; bits per byte of held-out source code above `full`; how many times as fast as `full` it decodes eight
contexts together, in float32 on two CPU cores (`python -m experiments.methods --speed`).

## The survey

{table(survey, results, "no.")}

## Other systems in use

{table(others, results, " ")}

## What differs from the papers or their public code

{notes}
"""
