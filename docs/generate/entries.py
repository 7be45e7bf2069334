"""kvjax's own methods, by name and by family.

Methods that a user or a package registers are left out, so that the pages do not depend on what else is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.registry.loading import load_all
from kvjax.registry.registration import FAMILIES, MethodEntry, is_builtin


def builtin_entries() -> dict[str, MethodEntry]:
    """kvjax's own methods, sorted by name."""
    return {name: entry for name, entry in sorted(load_all().items()) if is_builtin(entry.make)}


def entries_by_family() -> dict[str, list[MethodEntry]]:
    """Family -> its methods, in the order in which lists and menus show families."""
    return {family: [e for e in builtin_entries().values() if e.family == family] for family in FAMILIES}


def family_path(family: str) -> str:
    """The path of a family's page."""
    return f"families/{family.replace(' ', '_')}/index.md"


def code_list(names: Sequence[str]) -> str:
    """Names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)
