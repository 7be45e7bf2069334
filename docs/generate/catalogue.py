"""kvjax's methods as the pages show them: by family, with the verdict on each pair.

Methods that a user or a package adds are left out, so that the pages do not depend on what else is installed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from kvjax.methods.pairs import Verdict, judge_pair
from kvjax.methods.registry import FAMILIES, MethodEntry, is_builtin, load_all


def recipes() -> dict[str, MethodEntry]:
    """kvjax's own recipes by name, in the order of their names."""
    return {name: recipe for name, recipe in sorted(load_all().items()) if is_builtin(recipe.make)}


def by_family() -> dict[str, list[MethodEntry]]:
    """Family -> its recipes, in the order in which lists and menus show families."""
    return {family: [r for r in recipes().values() if r.family == family] for family in FAMILIES}


def family_page(family: str) -> str:
    """The path of a family's page."""
    return f"families/{family.replace(' ', '_')}/index.md"


@functools.cache
def _verdict(a: str, b: str) -> Verdict:
    return judge_pair(a, b)


def pair_verdict(a: str, b: str) -> Verdict:
    """Whether two methods compose; the order does not matter, and each pair is tried once."""
    return _verdict(*sorted((a, b)))


def refusals(name: str) -> dict[str, list[str]]:
    """Why a method does not compose with others: a short reason -> the methods that it holds for."""
    found: dict[str, list[str]] = {}
    for other in recipes():
        if other != name and not (said := pair_verdict(name, other)).works:
            found.setdefault(_short(said.reason), []).append(other)
    return found


def _short(reason: str) -> str:
    """A reason without the values of the slots that it names, and without the remedy."""
    inside = re.search(r": ([^:;]+); [a-z]+ .*$", reason)
    return inside.group(1) if inside else reason.split(";")[0]


def code_list(names: Sequence[str]) -> str:
    """Names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)
