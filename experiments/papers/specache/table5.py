"""SpeCache, Table 5: one-bit codes with the paper's levels or with KIVI's, with and without fetched tokens.

python -m experiments.papers.specache.table5 [--model DIR] [--tasks variables,needle]

KIVI's own levels at one bit are a group's extremes, so that decoded numbers are far too large. The paper moves both a
quarter inwards, which minimizes the error of uniformly distributed numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import kvjax
from experiments.bench.measuring import machine, report, table
from experiments.papers import common

# Qasper, 2WikiMQA, RB-P of LLaMA-3-8B, by (method, levels); `full` is from Table 1.
PAPER = {
    ("kivi", "original"): (3.7, 4.9, 20.3),
    ("specache", "original"): (4.1, 6.5, 21.6),
    ("kivi", "improved"): (23.9, 25.5, 22.0),
    ("specache", "improved"): (43.2, 36.9, 51.0),
}
FULL = (44.3, 37.0, 51.4)
NOTE = (
    "Differs from the paper: another model and other tasks; in the shipped model a head's value has 32 numbers. "
    "Original levels are the smallest and the largest of a group; improved ones lie a quarter of the way in."
)


def main(argv: Sequence[str] | None = None) -> None:
    args = common.add_quality_options(common.model_parser(__doc__)).parse_args(argv)
    before, model = machine(), kvjax.load(args.model)
    chosen = {f"{name}:bits=1,group={args.group},one_bit={levels}": paper for (name, levels), paper in PAPER.items()}
    records = common.measure(args, model, list(chosen))
    rows = [(r["method"], *common.format_record(r), *chosen.get(r["method"], FULL)) for r in records]
    columns = ("method", *common.record_columns(args, model), "paper: Qasper", "2WikiMQA", "RB-P")
    title = f"SpeCache, Table 5: {args.model}, {args.length:,}-token contexts"
    notes = [common.describe_protocol(args, model, records), NOTE]
    report("specache_table5", before, [table(title, columns, rows)], notes, records)


in_brief = common.brief(
    common.summarize_accuracy,
    "Qasper: full 44.3; kivi 3.7 original, 23.9 improved; specache 4.1 original, 43.2 improved",
    "Other tasks, another model. In the paper improved levels help, and fetched tokens help more.",
)

if __name__ == "__main__":
    common.run_script(main)
