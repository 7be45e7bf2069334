"""Which methods compose, as a page: `python -m tests.contract.composition` writes docs/composition.md."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from kvjax.cache.method import Method
from kvjax.methods.catalogue import Recipe, load_all
from kvjax.methods.pairs import Verdict, verdict

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"


def fills(recipe: Recipe) -> str:
    """The slots that a recipe fills."""
    method, default = recipe.make(), Method()
    names = [f.name for f in dataclasses.fields(Method) if f.compare]
    return ", ".join(f"`{name}`" for name in names if getattr(method, name) != getattr(default, name))


def short(found: Verdict) -> str:
    """The reason of a "no", without the values of the slots that it names."""
    inside = re.search(r": ([^:;]+); [a-z]+ .*$", found.reason)
    return inside.group(1) if inside else found.reason.split(";")[0]


def line(recipe: Recipe, recipes: dict[str, Recipe]) -> str:
    """The row of one method."""
    refused: dict[str, list[str]] = {}
    for other in recipes:
        found = verdict(recipe.name, other) if other != recipe.name else Verdict(True)
        if not found.works:
            refused.setdefault(short(found), []).append(f"`{other}`")
    reasons = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in refused.items())
    return f"| `{recipe.name}` | {fills(recipe)} | {reasons or 'none'} |"


def page() -> str:
    """The page."""
    recipes = load_all()
    names = sorted(recipes)
    pairs = [verdict(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    ordered = {name: recipes[name] for name in names}
    lines = "\n".join(line(recipe, ordered) for recipe in ordered.values())
    works = sum(v.works for v in pairs)
    return f"""# Which methods compose

Written by `python -m tests.contract.composition`; a test holds it to the code. `a + b` fills the slots of both; where
it cannot, `IncompatibleMethod` says which slots and what to do. Of {len(pairs)} pairs of {len(names)} methods
{works} compose.

A method goes with every method but those that its row names, each with the reason.

| method | fills | does not go with |
|---|---|---|
{lines}

- Methods that fill `represent`, `merge`, `shares` or `apart` may need a selection to stand on, as in
  `snapkv:budget=256 + kvcrush`; a pair of these, or of one of these and a method without a selection, goes with one.
- `specache + kivi` keeps the host's rows in low bits too; `offload + x` places on the host what x holds.

All pairs that compose keep their shapes, dtypes and memory kinds through a step. So many of them that every two slots
meet are run on ragged rows, and equal dense attention at their limits (`tests/contract/test_products.py`).
"""


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
