"""KVCrush, Figure 8: paged H2O and paged KVCrush against the full cache.

python -m experiments.papers.kvcrush.figure8 [--page 32 --length 2048: the paper's setting] [--pages 8,16,24]

H2O evicts whole pages by their summed attention, once per layer; KVCrush brings some of them back. The paper shows the
change in accuracy from the full cache, on GSM8K and XSUM with two models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import kvjax
from experiments.bench.measuring import machine, parse_integers
from experiments.papers import common
from experiments.papers.eviction import eviction_parser, measure
from experiments.papers.eviction_tables import (
    Line,
    describe_gains,
    draw_gain_bars,
    gain_points,
    quality_table,
    report_lines,
    signature_note,
)
from experiments.papers.kvcrush.table2 import paged_h2o

# GSM8K of Table II, which has the same setting: H2O, and the better of KVCrush's anchors (Phi-3 and Llama-3, strict).
COLUMNS = ("Phi-3", "Llama-3")
PAPER = {"H2O": (70.7, 74.9), "KVCrush": (75.4, 76.5)}


def lines(page: int, pages: int) -> list[Line]:
    """Paged H2O alone, and with KVCrush on a quarter and on three quarters of the middle pages, as in Table I."""
    base = paged_h2o(page, pages)
    h2o, crush = PAPER.values() if pages == 16 else ((), ())  # the paper's setting
    return [
        Line(f"paged H2O, {pages} pages", base, "full", h2o),
        Line("  + KVCrush, 25%", f"{base} + kvcrush:share=0.25", base, crush),
        Line("  + KVCrush, 75%", f"{base} + kvcrush:share=0.75", base, crush),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = eviction_parser(__doc__)
    # The page is half the paper's, as the context is: 16 middle pages are then the same part of it.
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
        "H2O's brackets are the deficit to full, KVCrush's the gain over H2O. The paper's columns are GSM8K, strict, "
        "from Table II (same setting, 16 pages of 32, the best anchor, the better of 25% and 75%); Figure 8 itself, "
        "GSM8K and XSUM, prints no numbers: KVCrush is above H2O in all four panels.",
        signature_note(model),
        draw_gain_bars(args.out / "kvcrush_figure8.png", found, pairs),
    ]
    tables = [quality_table(title, found, every, COLUMNS)]
    report_lines("kvcrush_figure8", before, args, found, tables, notes, lines=every, paper=COLUMNS)


def in_brief(results: Mapping[str, Any]) -> tuple[str, str, str]:
    """Summarizes the results for experiments/README.md: (ours, the paper's, the difference)."""
    base, crush = ([x for x in results["lines"] if x["base"] and ("KVCrush" in x["label"]) == k] for k in (False, True))
    below = ", ".join(f"{x['label'].partition(', ')[2]} {gain_points(x)[0]:+.1f}" for x in base)
    return (
        f"paged H2O to full, points: {below}; KVCrush: {describe_gains(crush)}",
        "GSM8K, 16 pages, Llama-3: H2O 74.9, KVCrush 76.5",
        "Other tasks, smaller pages, and as many bits as this model has query heads for each token of a page.",
    )


if __name__ == "__main__":
    common.run_script(main)
