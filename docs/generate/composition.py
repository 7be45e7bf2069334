"""The page of which methods compose, decided by composing every pair."""

from __future__ import annotations

import dataclasses
import itertools

from docs.generate.catalogue import code_list, pair_verdict, recipes, refusals
from kvjax.cache.method import Method
from kvjax.methods.registry import MethodEntry


def fills(recipe: MethodEntry) -> list[str]:
    """The slots that a recipe fills."""
    method, default = recipe.make(), Method()
    names = [f.name for f in dataclasses.fields(Method) if f.compare]
    return [name for name in names if getattr(method, name) != getattr(default, name)]


def row(recipe: MethodEntry) -> str:
    """The row of one method."""
    reasons = "; ".join(f"{code_list(names)} ({reason})" for reason, names in refusals(recipe.name).items())
    return f"| [`{recipe.name}`](methods/{recipe.name}.md) | {code_list(fills(recipe))} | {reasons or 'none'} |"


def page() -> str:
    """The page."""
    pairs = list(itertools.combinations(recipes(), 2))
    num_works = sum(pair_verdict(*pair).works for pair in pairs)
    rows = "\n".join(map(row, recipes().values()))
    return f"""# Which methods compose

`a + b` fills the slots of both. Where it cannot, `IncompatibleMethod` says which slots and what to do. {num_works:,} of
{len(pairs):,} pairs of {len(recipes())} methods compose; each pair was tried when this page was built.

A method composes with every method except those in its row.

| method | fills | does not compose with |
|---|---|---|
{rows}

- Methods that fill `representatives`, `merge`, `layer_budgets` or `side_store` may need a selection to stand on, as in
  `snapkv:budget=256 + kvcrush`. Such a pair composes together with a selection.
- `specache + kivi` keeps the host's tokens in low bits too; `offload + x` places on the host what `x` holds.

The tests take a step with pairs of every kind and compare shapes, dtypes and memory kinds. Pairs that together fill
every two slots are run on ragged batches and equal dense attention at their limits (`tests/contract/test_products.py`).
"""
