"""KVCrush, Table II: the anchors on H2O, with pages as in the paper and by single tokens.

python -m experiments.papers.kvcrush.table2 [--page 32 --length 2048: the paper's 32 first + 512 + 128 last tokens]

The paper measures GSM8K with pages of 32 tokens and gives KVCrush 384 of the 512 tokens between first and last ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import kvjax
from experiments.bench.measuring import machine
from experiments.papers import common
from experiments.papers.eviction import eviction_parser, measure
from experiments.papers.eviction_tables import (
    Line,
    describe_gains,
    gain_points,
    mean_score,
    quality_table,
    report_lines,
    signature_note,
)

# Strict and flexible match of Phi-3-mini-4k, Llama-3-8B and Llama-2-7b (Table II prints the last as fractions).
COLUMNS = ("Phi-3", "flex.", "Llama-3", "flex.", "Llama-2", "flex.")
PAPER = {
    "H2O": (70.7, 79.3, 74.9, 74.7, 20.9, 22.5),
    "random": (75.4, 80.9, 76.2, 76.2, 21.1, 22.6),
    "mean": (75.2, 80.6, 76.5, 76.4, 21.0, 22.9),
    "alternate": (74.6, 80.9, 75.7, 75.6, 21.2, 22.7),
}
ANCHORS = "random,mean,alternate,zeros,ones"


def paged_h2o(page: int, pages: int = 16, extra: str = "per=layer") -> str:
    """H2O by pages, as in Table I: one page of first tokens, `pages` in the middle, four of last tokens."""
    # `per=layer`: a page of the paged runtime holds all heads of a layer, which stay or leave together.
    return f"accumulated:budget={(pages + 5) * page},sinks={page},recent={4 * page},unit=page{page},{extra}"


def lines(base: str, share: float, anchors: Sequence[str]) -> list[Line]:
    """The method alone, and with KVCrush under each anchor."""
    crush = f"{base} + kvcrush:share={share},anchor="
    # Anchors that are not the paper's stand in the table without its figures.
    alone = [Line("H2O", base, paper=PAPER["H2O"])]
    return alone + [Line(f"  kvcrush.{a}", crush + a, base, PAPER.get(a, ())) for a in anchors]


def main(argv: Sequence[str] | None = None) -> None:
    parser = eviction_parser(__doc__, tasks=["phrases", "variables"])
    parser.add_argument("--budget", type=int, default=256, help="tokens kept, of the variant without pages")
    parser.add_argument("--page", type=int, default=16, help="tokens of a page; the budget is 21 pages")
    parser.add_argument("--share", type=float, default=0.75, help="of the budget, for KVCrush (the paper: 384 of 512)")
    parser.add_argument("--anchors", type=common.split_words, default=ANCHORS)
    args = parser.parse_args(argv)
    before, model = machine(), kvjax.load(args.model)
    groups = {
        f"pages of {args.page}, {21 * args.page} of {args.length} tokens": lines(
            paged_h2o(args.page), args.share, args.anchors
        ),
        f"tokens, {args.budget} of {args.length}": lines(f"accumulated:budget={args.budget}", args.share, args.anchors),
    }
    found = measure(model, args, [line.method for group in groups.values() for line in group])
    tables = [quality_table(f"KVCrush, Table II: {name}", found, group, COLUMNS) for name, group in groups.items()]
    notes = [
        signature_note(model),
        "The paper's columns: GSM8K, strict and flexible match, in percent. Ours: recall of phrases and variable "
        "tracking, not reasoning. For single tokens the mean anchor is the zero vector, since no head votes for more "
        "than half of the tokens; zeros and ones are not in the paper.",
    ]
    every = [line for group in groups.values() for line in group]
    report_lines("kvcrush_table2", before, args, found, tables, notes, lines=every, paper=COLUMNS)


def in_brief(results: Mapping[str, Any]) -> tuple[str, str, str]:
    """Summarizes the results for experiments/README.md: (ours, the paper's, the difference)."""
    crush = [line for line in results["lines"] if line["base"]]
    best = max(crush, key=lambda line: mean_score(results, line["method"]))
    mean, error = gain_points(best)
    return (
        f"{describe_gains(crush)}; best {best['label'].strip()} {mean:+.1f} ±{error:.1f} points",
        "GSM8K strict, Phi-3: H2O 70.7; random 75.4, mean 75.2, alternate 74.6",
        "Other tasks: recall, not reasoning. Between the paper's anchors lie 0.8 points on Phi-3; ours differ by "
        f"{max(gain_points(x)[0] for x in crush) - min(gain_points(x)[0] for x in crush):.1f} over both units.",
    )


if __name__ == "__main__":
    common.run_script(main)
