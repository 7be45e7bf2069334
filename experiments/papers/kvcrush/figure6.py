"""KVCrush, Figure 6: KVCrush and k-means over H2O, accuracy and latency side by side.

python -m experiments.papers.kvcrush.figure6 [--repeats 5] [--shapes 125m] [--no-accuracy]

Latency is prefill + 128 decode steps of one sequence, all methods in turns in one process. KVCrush adds less than the
scatter of such runs. The selection alone (scores, representatives and the gather, on existing keys, values and queries)
is therefore timed too, also in turns; its extra time over the whole time of the base is the overhead.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import kvjax
from experiments.bench.decoders import KvjaxDecoder
from experiments.bench.measuring import log_progress, machine, report, summary, table, time_in_turns, time_run
from experiments.bench.shapes import SHAPES
from experiments.papers import common
from experiments.papers.eviction import Prompts, eviction_parser, measure
from experiments.papers.eviction_tables import LEGEND, Line, document, quality_table, signature_note
from kvjax import Model

PAPER = {"kvcrush": "<0.5%", "kmeans": "about 200%"}


def lines(base: str, share: float) -> list[Line]:
    """H2O alone, and with each kind of representatives of the evicted tokens."""
    rest = {
        "+ kvcrush": f"kvcrush:share={share}",
        "+ kmeans of keys": f"kmeans:share={share}",
        "+ kmeans of bits": f"kmeans:share={share},features=bits",
    }
    return [Line("H2O", base), *(Line(label, f"{base} + {text}", base) for label, text in rest.items())]


def latency(model: Model, methods: Sequence[str], context: int, steps: int, repeats: int) -> dict[str, Any]:
    """Seconds of prefill + steps for each method, in turns, and of its selection alone; one random sequence."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, context), np.int32)
    sides = {name: KvjaxDecoder(model, kvjax.parse(name)) for name in methods}

    def time_whole(side: KvjaxDecoder) -> float:
        return side.prefill(ids, room=steps) + side.decode(steps)

    # The prompt is read once, so that every method selects from the same keys, values and queries.
    prompts = Prompts(model, list(ids), steps)

    def time_selection(side: KvjaxDecoder) -> float:
        return time_run(lambda: prompts.compress(side.method).cache)

    def time_all(time_one: Callable[[KvjaxDecoder], float], repeats: int) -> dict[str, list[float]]:
        for side in sides.values():
            time_one(side)  # compiles
        return time_in_turns({name: functools.partial(time_one, side) for name, side in sides.items()}, repeats)

    # The added times of a selection are a few milliseconds, and need more turns.
    return {"seconds": time_all(time_whole, repeats), "selection": time_all(time_selection, 3 * repeats)}


def overheads(timings: dict[str, Any], base: str) -> dict[str, dict[str, float]]:
    """Overhead of each method over `base`, by the paired ratios of whole runs and by the added selection time."""
    whole, part = timings["seconds"], timings["selection"]
    total = statistics.median(whole[base])
    found = {}
    for name in whole:
        # Ratios are paired by turn: both runs of a pair have met nearly the same load.
        ratios = [a / b for a, b in zip(whole[name], whole[base], strict=True)]
        added = statistics.median(a - b for a, b in zip(part[name], part[base], strict=True))
        extremes = {"whole_worst": max(ratios) - 1, "whole_best": min(ratios) - 1}
        parts = {"added_seconds": added, "added": added / total}
        found[name] = {"whole": statistics.median(ratios) - 1, **extremes, **parts}
    return found


def time_model(model: Model, args: argparse.Namespace, every: Sequence[Line], shape: str) -> tuple[Any, dict[str, Any]]:
    """Times all methods on one model; returns (table, record)."""
    log_progress(f"latency, {shape}")
    methods = [line.method for line in every]
    seconds = latency(model, methods, args.timed_length, args.steps, args.repeats)
    over = overheads(seconds, methods[0])
    rows = []
    for line in every:
        kind = next((k for k in PAPER if k in line.method), None)
        o, median = over[line.method], summary(seconds["seconds"][line.method])["median"]
        whole = f"{o['whole']:+.2%} ({o['whole_best']:+.1%} to {o['whole_worst']:+.1%})"
        ours = (whole, f"{1e3 * o['added_seconds']:+.2f}", f"{o['added']:+.3%}") if line.base else (None,) * 3
        rows.append((line.label, PAPER.get(kind), f"{median:.3f}", *ours))
    title = f"{shape}: prefill of {args.timed_length} tokens + {args.steps} decode steps, one sequence"
    columns = ("method", "paper", "seconds", "overhead, whole runs", "added, ms", "overhead, added time")
    return table(title, columns, rows), {"shape": shape, "overhead": over, **seconds}


def main(argv: Sequence[str] | None = None) -> None:
    parser = eviction_parser(__doc__)
    parser.add_argument("--budget", type=int, default=256, help="tokens kept")
    parser.add_argument("--share", type=float, default=0.25, help="of the budget, for representatives")
    parser.add_argument("--timed-length", type=int, default=2048, help="tokens of the timed prompt")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", type=common.split_words, default="125m", help="random models that are timed too")
    parser.add_argument("--no-accuracy", action="store_true", help="latency only")
    args = parser.parse_args(argv)
    unknown = [s for s in args.shapes if s not in SHAPES]
    if unknown:
        raise kvjax.KvjaxError(f"unknown shape {unknown[0]!r}; use {', '.join(SHAPES)}")
    before, model = machine(), kvjax.load(args.model)
    every = lines(f"accumulated:budget={args.budget}", args.share)
    tables, records, accuracy = [], [], {}
    for shape in (args.model, *args.shapes):
        t, record = time_model(kvjax.random_model(SHAPES[shape]) if shape in SHAPES else model, args, every, shape)
        tables.append(t)
        records.append(record)
    notes = [
        "The paper's latency was taken on a Xeon 8470, with k-means of an unstated kind and place; ours clusters once, "
        "after the prompt, in 10 iterations. Overhead by the added time: (selection with - selection without) / "
        "(prefill + steps without). In brackets the best and the worst pair of runs.",
        signature_note(model),
    ]
    if not args.no_accuracy:
        full = Line("full", "full")
        compared = [full] + [Line(x.label, x.method, x.base or full.method) for x in every]
        found = measure(model, args, [line.method for line in compared], with_text=True)
        tables.append(
            quality_table(f"KVCrush, Figure 6: accuracy at {args.budget} of {args.length} tokens", found, compared)
        )
        notes += [LEGEND, "The paper's Figure 6a prints no numbers: k-means slightly above KVCrush, that above H2O."]
        accuracy = document("kvcrush_figure6", args, found, compared)
    report("kvcrush_figure6", before, tables, notes, {**accuracy, "latency": records})


def describe(results: Mapping[str, Any]) -> str:
    """The overhead of both kinds on the last shape."""
    record = results["latency"][-1]
    added = {kind: max(o["added"] for m, o in record["overhead"].items() if kind in m) for kind in PAPER}
    return f"{record['shape']}, by the added time: " + ", ".join(f"{kind} {x:+.2%}" for kind, x in added.items())


in_brief = common.brief(
    describe,
    ", ".join(f"{kind} {said}" for kind, said in PAPER.items()),
    "Ours clusters once after the prompt; the paper does not state the place and the kind of its k-means.",
)

if __name__ == "__main__":
    common.run_script(main)
