"""SpeCache, Table 4: rows fetched a step ahead at the word of a guess, or chosen by the query itself and waited for.

python -m experiments.papers.specache.table4 [--model DIR] [--rows 8] [--tasks variables,copying]

Quality on tasks and text; and seconds per decode step of all variants, in turns, on --rows contexts of --length random
keys and values.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import kvjax
from experiments.bench.decoders import random_loop
from experiments.bench.measuring import log_progress, machine, report, summary, table, time_in_turns
from experiments.papers import common
from kvjax import Model

# Average over 10 LongBench tasks and ms per step, of LLaMA-3-8B with groups of 64, by (bits, speculative).
PAPER = {(2, False): (42.6, 877), (2, True): (42.5, 643), (1, False): (42.4, 1144), (1, True): (41.9, 775)}


def methods(group: int) -> dict[str, tuple[int, bool]]:
    """Method strings -> (bits, speculative)."""
    text = "specache:bits={},group={},speculative={}"
    return {text.format(bits, group, str(ahead).lower()): (bits, ahead) for bits, ahead in PAPER}


def latency(args: argparse.Namespace, model: Model, texts: Sequence[str]) -> dict[str, dict[str, float]]:
    """Seconds per step of each method, in turns within one run."""
    loops = {}
    for text in texts:
        log_progress(f"decode loop, {text}")
        room = args.steps * (args.repeats + 1)
        loops[text] = random_loop(model, kvjax.parse(text), args.rows, args.length, room)
        loops[text].decode(args.steps)
    runs = {text: (lambda loop=loop: loop.decode(args.steps) / args.steps) for text, loop in loops.items()}
    return {text: summary(s) for text, s in time_in_turns(runs, args.repeats).items()}


NOTE = (
    "Differs from the paper: another model and other tasks; its steps are of the largest batch that 48 GB hold at "
    "2,048 tokens, on a GPU, where fetching crosses a bus. {}"
)
ON_CPU = (
    "On this machine host and device memory are the same RAM and nothing runs beside the step: no bus to hide, and "
    "a guess only costs a second token."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints; see the module's text."""
    parser = common.add_quality(common.parser(__doc__))
    parser.add_argument("--rows", type=int, default=8, help="batch whose steps are timed")
    parser.add_argument("--steps", type=int, default=8, help="tokens per turn")
    parser.add_argument("--repeats", type=int, default=7, help="turns; the median counts")
    args = parser.parse_args(argv)
    before, model, chosen = machine(), kvjax.load(args.model), methods(args.group)
    seconds = latency(args, model, ["full", *chosen])
    records = [{**r, "seconds_per_step": seconds[r["method"]]} for r in common.measure(args, model, list(chosen))]
    rows = [row(r, chosen.get(r["method"])) for r in records]
    columns = ("method", *common.columns(args, model), "ms/step", "paper: LongBench", "ms/step ")
    title = f"SpeCache, Table 4: {args.model}, {args.length:,} tokens; steps of {args.rows} rows"
    note = NOTE.format(ON_CPU if before["device"] == "cpu" else "")
    notes = [common.protocol(args, model, records), note]
    report("specache_table4", before, [table(title, columns, rows)], notes, records)


def row(r: dict[str, Any], key: tuple[int, bool] | None) -> list[Any]:
    """A record for people."""
    said = PAPER.get(key, (42.7, None))
    return [r["method"], *common.cells(r), f"{r['seconds_per_step']['median'] * 1e3:.2f}", *said]


def in_brief(results: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    """(ours, the paper's, the difference) for the table of all scripts."""
    ms = {r["method"]: 1e3 * r["seconds_per_step"]["median"] for r in results}
    ours = "; ".join(f"{r['method']} {common.average(r):.1f}%, {ms[r['method']]:.1f} ms" for r in results)
    said = "; ".join(f"{bits} bit, speculative {str(a).lower()}: {q}, {t} ms" for (bits, a), (q, t) in PAPER.items())
    return ours, said, "The guess costs a second token and hides a bus; where there is no bus, only the cost is left."


if __name__ == "__main__":
    common.run(main)
