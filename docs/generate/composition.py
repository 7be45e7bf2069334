"""The page of pairs that do not compose, decided by composing every pair."""

from __future__ import annotations

import itertools

from docs.generate.entries import builtin_entries, code_list
from docs.generate.pairs import defined_components, judge_pair, refusals
from kvjax.registry.registration import MethodEntry


def table_row(entry: MethodEntry) -> str:
    """The row of one method."""
    reasons = "; ".join(f"{code_list(names)} ({reason})" for reason, names in refusals(entry.name).items())
    components = code_list(list(defined_components(entry.make())))
    return f"| [`{entry.name}`](methods/{entry.name}.md) | {components} | {reasons or 'none'} |"


def page() -> str:
    """The page."""
    entries = builtin_entries()
    pairs = list(itertools.combinations(entries, 2))
    num_composing = sum(judge_pair(*pair).composes for pair in pairs)
    rows = "\n".join(map(table_row, entries.values()))
    return f"""# Which methods compose

`a + b` has the components of both. Where they clash, `IncompatibleMethod` names the components and the remedy.
{num_composing:,} of {len(pairs):,} pairs of {len(entries)} methods compose; each pair was tried when this page was
built.

A method composes with every method except those in its row.

| method | defines | does not compose with |
|---|---|---|
{rows}

- Methods that define `representatives`, `merge`, `layer_budgets` or `side_store` may need a selection, as in
  `snapkv:budget=256 + kvcrush`. Such a pair composes together with a selection.
- `specache + kivi` stores the host's tokens in low bits too; `offload + x` moves the cache of `x` to the host.

The tests take a step with pairs of every kind and compare shapes, dtypes and memory kinds. Pairs that together define
every two components run on ragged batches and equal dense attention at their limits
(`tests/contract/test_products.py`).
"""
