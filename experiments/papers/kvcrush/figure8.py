"""KVCrush, Figure 8: paged H2O and paged KVCrush against the full cache.

python -m experiments.papers.kvcrush.figure8 [--page 32 --length 2048: the paper's setting] [--pages 8,16,24]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import kvjax
from experiments.bench.measuring import machine, parse_integers, report
from experiments.papers import common
from experiments.papers.eviction import arguments, measure
from experiments.papers.eviction_tables import (
    EXPLAINED,
    Line,
    document,
    gain_bars,
    gained,
    gains_in_words,
    quality,
    signature_note,
)
from experiments.papers.kvcrush.table2 import paged

# GSM8K of Table II, which has the same setting: H2O, and the better of KVCrush's anchors (Phi-3 and Llama-3, strict).
COLUMNS = ("Phi-3", "Llama-3")
PAPER = {"H2O": (70.7, 74.9), "KVCrush": (75.4, 76.5)}


def lines(page: int, pages: int) -> list[Line]:
    """Paged H2O, and with KVCrush on a quarter and on three quarters of the middle pages (Table I: the better one)."""
    base = paged(page, pages)

    def here(name):
        return PAPER[name] if pages == 16 else ()

    return [
        Line(f"paged H2O, {pages} pages", base, "full", here("H2O")),
        Line("  + KVCrush, 25%", f"{base} + kvcrush:share=0.25", base, here("KVCrush")),
        Line("  + KVCrush, 75%", f"{base} + kvcrush:share=0.75", base, here("KVCrush")),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--page", type=int, default=16, help="tokens of a page; one page of first tokens, four of last")
    parser.add_argument("--pages", type=parse_integers, default="8,16,24", help="pages kept in the middle (paper: 16)")
    args = parser.parse_args(argv)
    before, model = machine(), kvjax.load(args.model)
    groups = {f"{n} pages": lines(args.page, n) for n in args.pages}
    every = [Line("full", "full"), *(line for group in groups.values() for line in group)]
    found = measure(model, args, [line.method for line in every], with_text=True)
    title = f"KVCrush, Figure 8: pages of {args.page} tokens, contexts of {args.length}"
    pairs = {name: [x for x in group if x.base != "full"] for name, group in groups.items()}
    notes = [
        EXPLAINED,
        "H2O's brackets are the deficit to full, KVCrush's the gain over H2O. The paper's columns are GSM8K, strict, "
        "from Table II (same setting, 16 pages of 32, the best anchor, the better of 25% and 75%); Figure 8 itself, "
        "GSM8K and XSUM, prints no numbers: KVCrush is above H2O in all four panels.",
        signature_note(model),
        gain_bars(args.out / "kvcrush_figure8.png", found, pairs),
    ]
    results = document("kvcrush_figure8", args, found, every, COLUMNS)
    report("kvcrush_figure8", before, [quality(title, found, every, COLUMNS)], notes, results)


def in_brief(results: Mapping[str, Any]) -> tuple[str, str, str]:
    """(ours, the paper's, the difference) for the table of all scripts."""
    base, crush = ([x for x in results["lines"] if x["base"] and ("KVCrush" in x["label"]) == k] for k in (False, True))
    below = ", ".join(f"{x['label'].partition(', ')[2]} {gained(x)[0]:+.1f}" for x in base)
    return (
        f"paged H2O to full, points: {below}; KVCrush: {gains_in_words(crush)}",
        "GSM8K, 16 pages, Llama-3: H2O 74.9, KVCrush 76.5",
        "Other tasks, smaller pages, and as many bits as this model has query heads for each token of a page.",
    )


if __name__ == "__main__":
    common.run(main)
