"""SpeCache, Figure 5: quality by the number of fetched tokens, with a one-bit copy in groups of 32.

python -m experiments.papers.specache.figure5 [--model DIR] [--topk 0,4,8,16,32,64,128] [--tasks variables,copying]

0 tokens is `kivi` with the same residual. Writes specache_figure5.png into --out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import kvjax
from experiments.axes import limit_percents
from experiments.bench.measuring import machine, parse_integers, report, table
from experiments.papers import common

TOPK = [0, 4, 8, 16, 32, 64, 128]
# Averages over 10 LongBench tasks in Table 1, 1 bit, g = 32: Mistral, LLaMA-3. Its k = 0 has a residual of 128 tokens.
PAPER = {0: ("30.4", "26.7"), 64: ("40.4", "41.8")}
FULL = ("42.3", "42.7")


def method(k: int, args: argparse.Namespace) -> str:
    """The method string for k fetched tokens."""
    shared = f"bits=1,group={args.group},residual={args.residual}"
    # Without fetched tokens SpeCache is KIVI. It gets SpeCache's residual instead of its own 128: only k may differ.
    if not k:
        return f"kivi:{shared}"
    return f"specache:{shared},topk={k},speculative={str(args.speculative).lower()}"


def draw(axes: Any, records: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Draws accuracy by k, or without tasks the agreement with `full`, and bits per token by k; `full` is dashed."""
    full, points = records[0], records[1:]
    k = [r["topk"] for r in points]
    for i, task in enumerate(full["tasks"]):
        found = [r["tasks"][task] for r in points]
        right, error = ([100 * f[name] for f in found] for name in ("accuracy", "error"))
        axes[0].errorbar(k, right, error, marker="o", label=task)
        axes[0].axhline(100 * full["tasks"][task]["accuracy"], linestyle="--", color=f"C{i}", linewidth=1)
    if not full["tasks"]:
        axes[0].plot(k, [100 * r["agreement"] for r in points], marker="o")
        axes[0].axhline(100 * full["agreement"], linestyle="--", linewidth=1)
    axes[1].plot(k, [r["bits"] for r in points], marker="o", color="C3")
    axes[1].axhline(full["bits"], linestyle="--", color="C3", linewidth=1)
    # k = 0 has no logarithm.
    linear = min(filter(None, k), default=1)  # the axis is linear from 0 to the smallest k
    for axis, name in zip(axes, names, strict=True):
        axis.set_xscale("symlog", base=2, linthresh=linear)
        axis.set_xlim(-linear / 5, 1.2 * max(k))
        axis.set(xlabel="tokens fetched per key/value head, k (logarithmic)", ylabel=name, xticks=k, xticklabels=k)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(-3, 103)
    limit_percents(axes[0])
    if full["tasks"]:
        axes[0].legend(title="dashed: full")
    else:
        axes[0].set_title("dashed: full", fontsize=10)


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.add_quality_options(common.model_parser(__doc__))
    parser.add_argument("--topk", type=parse_integers, default=TOPK)
    parser.add_argument("--residual", type=int, default=64, help="recent tokens in full precision")
    parser.add_argument("--speculative", action=argparse.BooleanOptionalAction, default=True)
    parser.set_defaults(tasks=["variables", "copying"])
    args = parser.parse_args(argv)
    before, model = machine(), kvjax.load(args.model)
    chosen = {method(k, args): k for k in args.topk}
    records = [{**r, "topk": chosen.get(r["method"])} for r in common.measure(args, model, list(chosen))]
    columns = common.record_columns(args, model)

    rows = []
    for r in records:
        k = r["topk"]
        paper = FULL if k is None else PAPER.get(k, (None, None))
        rows.append(("full" if k is None else k, *common.format_record(r), *paper))
    path = args.out / "specache_figure5.png"
    right = "right answers, %" if records[0]["tasks"] else "tokens predicted as full, %"
    common.save_figure(path, lambda axes: draw(axes, records, (right, columns[-2])), 2)
    title = f"SpeCache, Figure 5: {args.model}, {args.length:,}-token contexts, 1 bit, groups of {args.group}"
    notes = [
        common.describe_protocol(args, model, records),
        "Differs from the paper: another model and other tasks. Its figure prints no numbers; these are from its "
        f"Table 1, LongBench averages, where 0 tokens are measured with residual 128. Plot: {path}",
    ]
    heads = ("k", *columns, "paper: Mistral", "LLaMA-3")
    report("specache_figure5", before, [table(title, heads, rows)], notes, records)


in_brief = common.brief(
    lambda results: ", ".join(f"{x['method']} {common.mean_accuracy(x):.1f}%" for x in results),
    f"LLaMA-3: full {FULL[1]}; " + ", ".join(f"k={k} {p[1]}" for k, p in PAPER.items()),
    "Other tasks, another model; in the paper k = 64 is enough.",
)

if __name__ == "__main__":
    common.run_script(main)
