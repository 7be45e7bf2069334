"""Which methods compose, as a page: `python -m tests.contract.composition` writes docs/composition.md."""

from __future__ import annotations

import itertools
from pathlib import Path

from kvjax.cache import compose, parse
from kvjax.core.types import IncompatibleMethod
from kvjax.methods import zoo

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"

EVICTION = (
    "snapkv",
    "pyramidkv",
    "accumulated",
    "keynorm",
    "random",
    "sinks_and_recent",
    "snapkv + kvcrush",
    "snapkv + kmeans",
)
HELD = ("", "kivi:bits=4", "kivi:bits=2")
PLACED = ("", "offload")
READ = ("", "kcache", "specache")


def products() -> list[str]:
    """Every eviction method x how rows are held x where x how they are read, as method strings."""
    return [" + ".join(filter(None, parts)) for parts in itertools.product(EVICTION, HELD, PLACED, READ)]


def mark(a: str, b: str) -> str:
    """ "yes", or why not."""
    try:
        compose(parse(a), parse(b))
    except IncompatibleMethod as e:
        return "one reader" if "`read`" in str(e) else "one selection" if "`select`" in str(e) else "own rules"
    return "yes"


def page() -> str:
    """The page."""
    names = [n for n in zoo.RECIPES if n not in ("kmeans", "full")]
    lines = [f"| | {' | '.join(f'`{n}`' for n in names)} |", "|---" * (len(names) + 1) + "|"]
    for i, a in enumerate(names):
        cells = ["" if j <= i else mark(a, b) for j, b in enumerate(names)]
        lines.append(f"| `{a}` | {' | '.join(cells)} |")
    return f"""# Which methods compose

Written by `python -m tests.contract.composition`; a test holds it to the code. `a + b` fills the slots of both; where
it cannot, `IncompatibleMethod` says which slot and what to do. `full` goes with everything, `kmeans` where `kvcrush`
goes.

{chr(10).join(lines)}

- "one reader": both decide which slots a query reads. "one selection": both decide which prompt tokens stay.
- "own rules": a method that evicts while it decodes, or fetches blocks by rules of its own, holds its tokens itself.
- `kvcrush` needs an eviction method to stand on: `snapkv:budget=256 + kvcrush`.
- `specache + kivi` keeps the host's rows in low bits too; `offload + x` places on the host what x holds.

All {len(products())} products of {len(EVICTION)} ways to select, 3 ways to hold (plain, 4 bits, 2 bits), 2 places and
3 ways to read (`full`, `kcache`, `specache`) keep their shapes, dtypes and memory kinds through a step, and those of
`snapkv + kvcrush` equal dense attention at their limits (`tests/contract`). The ways to select are
{", ".join(f"`{e}`" for e in EVICTION)}.
"""


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
