"""Tables and figures on the choice of tokens and their division among heads, from results of experiments/divisions.py.

python -m experiments.divisions_figure    prints the tables of docs/results.md, writes docs/quality_against_bytes.png
                                          (README's picture) and docs/where_tokens_stay.png

A cell is the percent of counted questions with a right answer, and its standard error over contexts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import equal_bytes_table
from experiments.bench.measuring import output_file
from kvjax.eval.page.summary import mean_error

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
CURVES = ROOT / "docs" / "quality_against_bytes.png"
WHERE = ROOT / "docs" / "where_tokens_stay.png"
DIVISIONS = ("equal", "within a layer", "over the model")
SHARES = ("1/2", "1/4", "1/8", "1/16")
NO_ANSWERS = "0 ±0"  # the cell of a method that answers nothing in any context
MIN_LABELED_PERCENT = 5.0  # labels of points below would overlap
COLORS = dict(zip(DIVISIONS, ("C3", "C1", "C2"), strict=True))


class Curve(NamedTuple):
    """One line of README's picture: the methods `start` + a number + `end`."""

    name: str
    start: str
    end: str
    color: str
    style: str = "-"

    def has_point(self, method: str) -> bool:
        """Whether a method is a point of the line."""
        middle = method.removeprefix(self.start).removesuffix(self.end)
        return method.startswith(self.start) and method.endswith(self.end) and middle.isdecimal()


EVICTION = (
    Curve("kvzip over the model, in 4 bits", "kvzip:budget=", " + int4", "C4"),
    Curve("turned_queries over the model, in 4 bits", "turned_queries:budget=", " + int4", "C0"),
    Curve("kvzip over the model", "kvzip:budget=", "", "C4", "--"),
    Curve("turned_queries over the model", "turned_queries:budget=", "", "C0", "--"),
    Curve("keydiff over the model", "keydiff:budget=", " + adakv:alpha=0,scope=model", "C2", "--"),
    Curve("kvzip, equal heads", "kvzip:budget=", ",level=head", "C4", ":"),
    Curve("snapkv, equal heads", "snapkv:budget=", "", "C3", ":"),
)
POINTS = {
    "kivi:residual=32,bits=4": "kivi, 4 bits",
    "int4": "int4",
    "turboquant:ends=0,k_bits=3,v_bits=3": "turboquant, 3 bits",
    "kivi:residual=32,bits=2": "kivi, 2 bits",
    "specache:residual=32,bits=1": "specache, 1 bit + host",
    "quest:budget=256,device_layers=0 + offload": "quest + host",
}


class Results:
    """Queries on a document of experiments/divisions.py."""

    def __init__(self, document: Mapping[str, Any]):
        self.document = document
        self.settings = document["settings"]

    def scores(self, method: str, protocol: str) -> np.ndarray | None:
        """Percent of right answers of each context, seed after seed; None for a method without measurements."""
        by_seed = self.document["measured"].get(method, {}).get(protocol)
        if by_seed is None:
            return None
        # By context: its questions share one compressed cache, so they are no independent samples. Seeds are in one
        # order, which pairs the contexts of two methods.
        return np.concatenate([100 * np.mean(by_seed[seed]["right"], -1) for seed in sorted(by_seed)])

    def method(self, scorer: str, division: str, share: str) -> str | None:
        """The method string of a cell of the grid."""
        key = ("scorers", scorer, division, share)
        found = (s["method"] for s in self.settings if (s["group"], s["scorer"], s["division"], s["share"]) == key)
        return next(found, None)

    def scorers(self) -> list[str]:
        """Names of the scorers in the order of the settings."""
        return list(dict.fromkeys(s["scorer"] for s in self.settings if s["group"] == "scorers"))

    def errors(self, method: str) -> float | None:
        """The mean relative error of attention over layers and seeds."""
        by_seed = self.document["measured"].get(method, {}).get("turns", {})
        found = [np.mean(s["errors"]) for s in by_seed.values() if "errors" in s]
        return float(np.mean(found)) if found else None

    def tokens_per_head(self, method: str) -> np.ndarray:
        """Mean number of tokens that each head keeps, f64[L K]."""
        return np.mean([s["kept"] for s in self.document["measured"][method]["turns"].values()], 0)


def cell(values: np.ndarray | None, form: str = ".0f") -> str:
    """Formats a mean and its standard error."""
    if values is None:
        return "-"
    mean, error = mean_error(values.tolist())
    return f"{mean:{form}}" if error is None else f"{mean:{form}} ±{error:.0f}"


def table(results: Results, protocol: str, shares: Sequence[str]) -> str:
    """A Markdown table with a row for each scorer and division."""
    exact = cell(results.scores("full", protocol))
    lines = [
        f"| scores (exact cache: {exact}) | division | {' | '.join(f'{s} of the bytes' for s in shares)} |",
        "|---|---|" + "---:|" * len(shares),
    ]
    without_answers = []  # scorers whose rows are zero throughout, which share the last line
    for scorer in results.scorers():
        rows = {}
        for division in DIVISIONS:
            methods = [results.method(scorer, division, share) for share in shares]
            cells = [cell(None if m is None else results.scores(m, protocol)) for m in methods]
            if set(cells) != {"-"}:
                rows[division] = cells
        zero = [division for division, cells in rows.items() if set(cells) == {NO_ANSWERS}]
        lines += [f"| {scorer} | {name} | {' | '.join(cells)} |" for name, cells in rows.items() if name not in zero]
        if zero:
            without_answers.append(scorer if len(zero) == len(rows) else f"{scorer} {' and '.join(zero)}")
    if without_answers:
        lines.append(f"| {'; '.join(without_answers)} | each |{f' {NO_ANSWERS} |' * len(shares)}")
    return "\n".join(lines)


def more_table(results: Results, omitted: Collection[str] = ()) -> str:
    """A Markdown table of the settings outside the grid that hold everything on the device, with their bytes.

    `omitted` are methods that another table shows.
    """
    lines = ["| method | device | later questions |", "|---|---:|---:|"]
    for method in dict.fromkeys(s["method"] for s in results.settings if s["group"] != "scorers"):
        device, _ = results.document["bytes"][method]
        if method not in omitted:
            lines.append(f"| `{method}` | {100 * device:.1f}% | {cell(results.scores(method, 'turns'))} |")
    return "\n".join(lines)


def gain_table(results: Results, protocol: str) -> str:
    """A Markdown table of the gains of both divisions over equal heads, in points, paired by context."""
    lines = ["| scores | share | within a layer | over the model |", "|---|---|---:|---:|"]
    for scorer in results.scorers():
        for share in SHARES:
            found = [results.method(scorer, division, share) for division in DIVISIONS]
            scores = [None if m is None else results.scores(m, protocol) for m in found]
            if scores[0] is None:
                continue
            # A method that lacks some seeds cannot be paired.
            gains = ["-" if s is None or len(s) != len(scores[0]) else cell(s - scores[0], "+.0f") for s in scores[1:]]
            lines.append(f"| {scorer} | {share} | {' | '.join(gains)} |")
    return "\n".join(lines)


def correlations(results: Results) -> dict[str, float]:
    """Spearman's rank correlation of the settings' attention errors with their answers, by share."""
    # The correlation is of ranks, since nothing says that answers fall linearly with the error.
    found = {}
    for share in (*SHARES, "all"):
        pairs = [
            (results.errors(s["method"]), results.scores(s["method"], "turns"))
            for s in results.settings
            if s["group"] == "scorers" and share in (s["share"], "all")
        ]
        known = [(error, right.mean()) for error, right in pairs if error is not None and right is not None]
        if len(known) > 2:  # two points always correlate perfectly
            x, y = (_ranks(np.array(values)) for values in zip(*known, strict=True))
            # Equal values everywhere have no order.
            found[share] = float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else float("nan")
    return found


def _ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share their mean rank."""
    order = np.argsort(x, kind="stable")
    ranks = np.empty(len(x))
    ranks[order] = np.arange(len(x))
    return np.array([ranks[x == value].mean() for value in x])


def draw(results: Results, path: Path, share: str, scorers: Sequence[str]) -> None:
    """Draws the tokens that each head keeps, and the answers against the error of attention."""
    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    figure.suptitle(f"{results.document['model']}, {share} of the bytes. Left: one ranking over the model", fontsize=10)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.5))
    for ax, scorer in zip((left, middle), scorers, strict=True):
        tokens = results.tokens_per_head(results.method(scorer, "over the model", share) or "")
        image = ax.imshow(tokens, aspect="auto", cmap="viridis", vmin=0, vmax=results.document["length"])
        ax.set_title(f"scores: {scorer.partition(' (')[0]}", fontsize=9)
        ax.set_xlabel("key/value head")
        ax.set_xticks(range(tokens.shape[1]))
    left.set_ylabel("layer")
    middle.set_yticks([])
    bar = figure.colorbar(image, ax=(left, middle), shrink=0.8)
    bar.set_label(f"tokens kept of {results.document['length']:,}", fontsize=8)
    _draw_errors(right, results, share)
    figure.savefig(path, dpi=150)


def _draw_errors(ax: Axes, results: Results, share: str) -> None:
    for division in DIVISIONS:
        for scorer in results.scorers():
            method = results.method(scorer, division, share)
            if method is None or (error := results.errors(method)) is None:
                continue
            scores = results.scores(method, "turns")
            assert scores is not None
            mean, bar = mean_error(scores.tolist())
            ax.errorbar(100 * error, mean, bar, color=COLORS[division], marker="o", capsize=2, lw=1)
            if mean > MIN_LABELED_PERCENT:
                name = scorer.partition(" (")[0]
                ax.annotate(name, (100 * error, mean), (5, 3), fontsize=7, textcoords="offset points")
    # Points have labels of their own; only the divisions' colors need a legend.
    for division in DIVISIONS:
        ax.plot([], [], "o", color=COLORS[division], label=division)
    exact = results.scores("full", "turns")
    if exact is not None:
        ax.axhline(exact.mean(), color="0.6", linewidth=0.8, zorder=0)
        ax.annotate("the exact cache", (0.99, exact.mean()), (0, 3), xycoords=("axes fraction", "data"),
                    textcoords="offset points", ha="right", fontsize=7, color="0.4")  # fmt: skip
    ax.set_xlabel("relative error of attention, later questions' queries, %")
    ax.set_ylabel("later questions answered right, %")
    ax.set(ylim=(-4, 104), yticks=range(0, 101, 20))
    ax.set_title("bars are standard errors over contexts", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False, title="division of the budget", title_fontsize=8)


def draw_curves(results: Results, path: Path) -> None:
    """Draws README's picture: answers to later questions against the cache's bytes on the device."""
    figure = Figure(figsize=(8.6, 4.8), layout="constrained")
    ax = figure.subplots()
    exact = results.scores("full", "turns")
    assert exact is not None
    ax.axhline(exact.mean(), color="0.6", linewidth=0.8, zorder=0)
    ax.annotate("the exact cache", (0.0, exact.mean()), (6, 4), xycoords=("axes fraction", "data"),
                textcoords="offset points", fontsize=8, color="0.4")  # fmt: skip
    for curve in EVICTION:
        points = sorted(_point(results, m) for m in results.document["bytes"] if curve.has_point(m))
        if points:
            device, mean, error = (list(x) for x in zip(*points, strict=True))
            ax.errorbar(device, mean, error, color=curve.color, ls=curve.style, marker="o", ms=4, capsize=2, lw=1.4)
            ax.plot([], [], color=curve.color, ls=curve.style, marker="o", ms=4, lw=1.4, label=curve.name)
    for method, name in POINTS.items():
        if method in results.document["bytes"] and results.scores(method, "turns") is not None:
            device, mean, error = _point(results, method)
            host = results.document["bytes"][method][1] > 0.01
            ax.errorbar(device, mean, error, color="0.25", marker="s", ms=5, mfc="white" if host else "0.25", capsize=2)
            ax.annotate(name, (device, mean), (6, -3), fontsize=8, textcoords="offset points")
    ax.set_xscale("log")  # shares halve from point to point
    ticks = (6.25, 12.5, 25, 50)
    ax.set_xticks(ticks, [f"1/{round(100 / tick)}" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set(ylim=(-4, 104), yticks=range(0, 101, 20))
    ax.set_xlabel("bytes of the cache on the device, of the exact cache's, both in bfloat16 (logarithmic)")
    ax.set_ylabel("later questions answered right, %")
    ax.set_title(
        f"SmolLM2-135M, 1,024 tokens of essays; bars are standard errors over {len(exact)} contexts", fontsize=9
    )
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=7.5, frameon=False, ncols=2, handlelength=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    figure.savefig(path, dpi=150)


def _point(results: Results, method: str) -> tuple[float, float, float]:
    """Percent of the bytes, percent of right answers, and its standard error."""
    scores = results.scores(method, "turns")
    mean, error = mean_error([] if scores is None else scores.tolist())
    return 100 * results.document["bytes"][method][0], mean or 0.0, error or 0.0


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables and draws the figures."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("results", type=Path, nargs="?", default=RESULTS / "divisions.smollm2.json")
    p.add_argument("--curves", type=output_file, default=CURVES, help="file of README's picture")
    p.add_argument("--where", type=output_file, default=WHERE, help="file of the figure")
    p.add_argument("--share", default="1/4", help="of the bytes, in the figure")
    p.add_argument("--scorers", default="repeated prompt (KVzip);turned queries", help="two of them, in the figure")
    p.add_argument("--no-pictures", action="store_true")
    args = p.parse_args(argv)
    results = Results(json.loads(args.results.read_text()))
    shares = [s for s in SHARES if any(x["share"] == s and x["group"] == "scorers" for x in results.settings)]
    for protocol in ("turns", "alone"):
        print(f"\n{protocol}\n\n{table(results, protocol, shares)}")
    print(f"\nPaired gains, turns\n\n{gain_table(results, 'turns')}")
    print(f"\n{more_table(results, json.loads(equal_bytes_table.RESULTS.read_text())['scores'])}")
    print("\nRank correlation of the error of attention with the answers:", correlations(results))
    if not args.no_pictures:
        draw_curves(results, args.curves)
        draw(results, args.where, args.share, args.scorers.split(";"))


if __name__ == "__main__":
    main()
