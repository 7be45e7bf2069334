"""README's picture: later questions answered against the cache's bytes on the device.

python -m experiments.quality_against_bytes [--out FILE]    writes docs/quality_against_bytes.png

It reads results/divisions.smollm2.json, the records of a closed study: SmolLM2-135M, questions that no method has seen
when it compresses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.bench.measuring import output_file
from kvjax.eval.page.intervals import score_interval

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "divisions.smollm2.json"
# Legend: (the methods of a line, with * for the budget; color; line style).
LINES = {
    "kvzip over the model, in 4 bits": ("kvzip:budget=* + int4", "C4", "-"),
    "turned_queries over the model, in 4 bits": ("turned_queries:budget=* + int4", "C0", "-"),
    "kvzip over the model": ("kvzip:budget=*", "C4", "--"),
    "turned_queries over the model": ("turned_queries:budget=*", "C0", "--"),
    "keydiff over the model": ("keydiff:budget=* + adakv:alpha=0,scope=model", "C2", "--"),
    "kvzip, equal heads": ("kvzip:budget=*,level=head", "C4", ":"),
    "snapkv, equal heads": ("snapkv:budget=*", "C3", ":"),
}
POINTS = {
    "kivi:residual=32,bits=4": "kivi, 4 bits",
    "int4": "int4",
    "turboquant:ends=0,k_bits=3,v_bits=3": "turboquant, 3 bits",
    "kivi:residual=32,bits=2": "kivi, 2 bits",
    "specache:residual=32,bits=1": "specache, 1 bit + host",
    "quest:budget=256,device_layers=0 + offload": "quest + host",
}


def read_scores() -> dict[str, np.ndarray]:
    """Percent of later questions answered right in each context, by method."""
    scores = {}
    for method, protocols in json.loads(RESULTS.read_text())["measured"].items():
        by_seed = protocols.get("turns", {})
        # By context: its questions share one compressed cache, so they are no independent samples.
        means = [100 * np.mean(by_seed[seed]["right"], -1) for seed in sorted(by_seed)]
        if means:
            scores[method] = np.concatenate(means)
    return scores


def find_methods(pattern: str, methods: Sequence[str]) -> list[str]:
    """The methods of a line, from the smallest budget to the largest."""
    start, end = pattern.split("*")
    budgets = {m: m.removeprefix(start).removesuffix(end) for m in methods if m.startswith(start) and m.endswith(end)}
    return sorted((m for m, budget in budgets.items() if budget.isdecimal()), key=lambda m: int(budgets[m]))


def main(argv: Sequence[str] | None = None) -> None:
    """Draws the picture."""
    # Imported here, so that the tests that read the records alone do not wait for it.
    from matplotlib.figure import Figure

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=output_file, default=ROOT / "docs" / "quality_against_bytes.png")
    args = p.parse_args(argv)
    scores, fractions = read_scores(), json.loads(RESULTS.read_text())["bytes"]
    figure = Figure(figsize=(8.6, 4.8), layout="constrained")
    ax = figure.subplots()

    def draw(methods: Sequence[str], **style) -> None:
        means = np.array([scores[m].mean() for m in methods])
        ends = 100 * np.array([score_interval(scores[m] / 100) for m in methods])
        reaches = np.abs(ends.T - means)  # rounding may leave a mean outside its interval
        ax.errorbar([100 * fractions[m][0] for m in methods], means, reaches, capsize=2, elinewidth=0.8, **style)

    exact = scores["full"]
    ax.axhline(exact.mean(), color="0.6", linewidth=0.8, zorder=0)
    at_left = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    ax.annotate("the exact cache", (0.0, exact.mean()), (6, 4), fontsize=8, color="0.4", **at_left)
    for name, (pattern, color, line) in LINES.items():
        style = {"color": color, "ls": line, "marker": "o", "ms": 4, "lw": 1.4}
        draw(find_methods(pattern, list(fractions)), **style)
        ax.plot([], [], label=name, **style)
    for method, name in POINTS.items():
        on_host = fractions[method][1] > 0.01
        draw([method], color="0.25", marker="s", ms=5, mfc="white" if on_host else "0.25")
        place = 100 * fractions[method][0], scores[method].mean()
        ax.annotate(name, place, (6, -3), fontsize=8, textcoords="offset points")
    # Logarithmic, since shares halve from point to point.
    ticks = (6.25, 12.5, 25, 50)
    ax.set(xscale="log", ylim=(-4, 104), yticks=range(0, 101, 20))
    ax.set_xticks(ticks, [f"1/{round(100 / tick)}" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("bytes of the cache on the device, of the exact cache's, both in bfloat16 (logarithmic)")
    ax.set_ylabel("later questions answered right, %")
    title = f"SmolLM2-135M, 1,024 tokens of essays; bars are 95% intervals over {len(exact)} contexts"
    ax.set_title(title, fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=7.5, frameon=False, ncols=2, handlelength=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
