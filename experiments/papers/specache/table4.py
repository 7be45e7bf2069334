"""SpeCache, Table 4: tokens prefetched for a predicted next query, or fetched for the query itself.

python -m experiments.papers.specache.table4 [--model DIR] [--rows 8] [--tasks variables,copying]

Quality on tasks and text, and seconds per decode step of all variants, in turns, on --rows contexts of --length random
keys and values. A prefetch hides the bus behind the step before, but needs a second token per step, the predicted one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import kvjax
from experiments.bench.decoders import random_loop, time_decode_steps
from experiments.bench.measuring import log_progress, machine, report, summary, table
from experiments.papers import common
from kvjax import Model

# Average over 10 LongBench tasks and ms per step, of LLaMA-3-8B with groups of 64, by (bits, speculative).
PAPER = {(2, False): (42.6, 877), (2, True): (42.5, 643), (1, False): (42.4, 1144), (1, True): (41.9, 775)}


def methods(group: int) -> dict[str, tuple[int, bool]]:
    """(bits, speculative) by method string."""
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
    # All methods have one batch, so that they can take turns; the paper times each at the largest batch that fits.
    return {text: summary(s) for text, s in time_decode_steps(loops, args.steps, args.repeats).items()}


NOTE = (
    "Differs from the paper: another model and other tasks; its steps are of the largest batch that 48 GB hold at "
    "2,048 tokens, on a GPU, where fetching crosses a bus. {}"
)
ON_CPU = (
    "On this machine host and device memory are the same RAM and nothing runs in parallel to the step: there is no "
    "bus to hide, and a prediction only costs a second token."
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.add_quality_options(common.model_parser(__doc__))
    parser.add_argument("--rows", type=int, default=8, help="batch whose steps are timed")
    parser.add_argument("--steps", type=int, default=8, help="tokens per turn")
    parser.add_argument("--repeats", type=int, default=7, help="turns; the median counts")
    args = parser.parse_args(argv)
    before, model, chosen = machine(), kvjax.load(args.model), methods(args.group)
    seconds = latency(args, model, ["full", *chosen])
    records = [{**r, "seconds_per_step": seconds[r["method"]]} for r in common.measure(args, model, list(chosen))]
    rows = []
    for r in records:
        paper = PAPER.get(chosen.get(r["method"]), (42.7, None))  # 42.7: `full`
        rows.append([r["method"], *common.format_record(r), f"{r['seconds_per_step']['median'] * 1e3:.2f}", *paper])
    columns = ("method", *common.record_columns(args, model), "ms/step", "paper: LongBench", "ms/step ")
    title = f"SpeCache, Table 4: {args.model}, {args.length:,} tokens; steps of {args.rows} sequences"
    note = NOTE.format(ON_CPU if before["device"] == "cpu" else "")
    notes = [common.describe_protocol(args, model, records), note]
    report("specache_table4", before, [table(title, columns, rows)], notes, records)


def describe(results: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy and milliseconds per step of each method."""
    ms = {r["method"]: 1e3 * r["seconds_per_step"]["median"] for r in results}
    return "; ".join(f"{r['method']} {common.mean_accuracy(r):.1f}%, {ms[r['method']]:.1f} ms" for r in results)


in_brief = common.brief(
    describe,
    "; ".join(f"{bits} bit, speculative {str(a).lower()}: {q}, {t} ms" for (bits, a), (q, t) in PAPER.items()),
    "The prediction costs a second token and hides a bus; without a bus only the cost is left.",
)

if __name__ == "__main__":
    common.run_script(main)
