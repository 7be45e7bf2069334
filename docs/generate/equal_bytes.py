"""The pages of methods at equal bytes, from what `python -m experiments.equal_bytes` measured."""

from __future__ import annotations

import dataclasses
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.equal_bytes import FULL, RESULTS
from kvjax.eval.page.summary import mean_error
from kvjax.methods.strings import parse_parts

PAGES = {RESULTS: "equal_bytes", RESULTS.with_name("equal_bytes.smollm2.json"): "equal_bytes.smollm2"}
"""What was measured -> the name of its page."""

TITLES = {
    "niah": "needles",
    "ruler.vt": "variable tracking",
    "turns": "later questions",
    "ppl": "text",
    "niah.essays": "needles in essays",
    "turns.essays": "later questions on essays",
    "humaneval.bits": "HumanEval's solutions",
}
MODELS = {"testbed": "the testbed model", "smollm2-135m": "SmolLM2-135M"}
IN_BITS = ("ppl", "humaneval.bits")  # tasks that are measured in bits per byte, above the full cache's
SMALLER = ("1/32", "1/64", "1/128")  # what methods take that leave nearly everything to the host
BITS = (0, 0.01, 0.03, 0.1, 0.3, 1, 3)  # per byte above the full cache's; linear up to the second
MARKERS = "osD^v<>P*Xhpd|+"


@dataclasses.dataclass(frozen=True)
class Result:
    """What a document of experiments.equal_bytes says."""

    document: Mapping[str, Any]

    @property
    def shares(self) -> list[str]:
        """From the largest."""
        return sorted({p["share"] for p in self.document["points"]}, key=Fraction, reverse=True)

    @property
    def families(self) -> list[str]:
        """Those with a method that was measured, in the order of the settings."""
        return list(dict.fromkeys(p["family"] for p in self.points()))

    @property
    def dtype(self) -> str:
        """In which the shares' bytes are counted; documents of before November 2026 do not say so."""
        return self.document.get("bytes_in", "float32")

    def bfloat16(self, method: str) -> tuple[float, float]:
        """What a method holds on the device and on the host, of the exact cache's bytes, both in bfloat16."""
        return tuple(self.document["bfloat16"][method])

    def points(self, family: str | None = None, share: str | None = None) -> list[Mapping[str, Any]]:
        """Those of a family, a share, or both, that fit and were measured."""
        kept = [p for p in self.document["points"] if p["method"] in self.document["scores"]]
        return [p for p in kept if family in (None, p["family"]) and share in (None, p["share"])]

    def contexts(self, method: str, task: str) -> np.ndarray:
        """The scores of all contexts, of all seeds."""
        by_seed = self.document["scores"].get(method, {}).get(task, {})
        return np.concatenate([by_seed[seed] for seed in sorted(by_seed)]) if by_seed else np.zeros(0)

    def score(self, method: str, task: str) -> tuple[float | None, float | None]:
        """(percent right, or bits per byte above the full cache's; the standard error over contexts)."""
        values = self.contexts(method, task)
        if not len(values):
            return None, None
        return mean_error(self.differences(method, task) if task in IN_BITS else 100 * values)

    def counts(self) -> str:
        """How many contexts there are of each task, in words."""
        return ", ".join(f"{len(self.contexts(FULL, task))} of {TITLES[task]}" for task in self.document["tasks"])

    def differences(self, method: str, task: str) -> np.ndarray:
        """Context by context, a method's scores minus the full cache's: points of a percentage, or bits per byte."""
        found = self.contexts(method, task) - self.contexts(FULL, task)
        return found if task in IN_BITS else 100 * found


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 95% bootstrap interval of the mean: contexts drawn anew, 10,000 times."""
    drawn = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.percentile(values[drawn].mean(1), (2.5, 97.5))
    return float(low), float(high)


def worth(task: str, score: float) -> float:
    """Higher is better."""
    return -score if task in IN_BITS else score


def shown(task: str, score: float | None, error: float | None = None) -> str:
    """For a cell."""
    if score is None:
        return ""
    form = "{:+.3f}" if task in IN_BITS else "{:.1f}"
    return form.format(score) + (f" ±{form.format(error).lstrip('+')}" if error is not None else "")


def label(settings: str) -> str:
    """A method without its sizes."""
    return " + ".join(part.name for part in parse_parts(settings.split(";")[0].strip()))


def family_table(result: Result, task: str) -> str:
    """One task: for each family and share the best method, and the median of the family."""
    lines = [f"| {TITLES[task]} | {' | '.join(result.shares)} |", "|---" * (len(result.shares) + 1) + "|"]
    for family in result.families:
        cells = [_best(result, task, result.points(family, share)) for share in result.shares]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _best(result: Result, task: str, points: Sequence[Mapping[str, Any]]) -> str:
    found = [(result.score(p["method"], task), p) for p in points]
    found = [((score, error), p) for (score, error), p in found if score is not None]
    if not found:
        return ""
    (score, error), best = max(found, key=lambda f: worth(task, f[0][0]))
    middle = statistics.median(score for (score, _), _ in found)
    return f"**{shown(task, score, error)}** {label(best['settings'])}; median {shown(task, middle)}"


def share_table(result: Result, share: str) -> str:
    """All methods at a share, family by family."""
    tasks = result.document["tasks"]
    own = [] if result.dtype == "bfloat16" else [f"device, {result.dtype}"]
    heads = ["method", "device, bfloat16", "host, bfloat16", *own, *(TITLES[t] for t in tasks)]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    lines.append(_line(result, FULL, result.document["full_bytes"]))
    for family in result.families:
        points = result.points(family, share)
        lines += [f"| *{family}* |" + " |" * (len(heads) - 1)] if points else []
        lines += [_line(result, p["method"], p["device_bytes"]) for p in points]
    return "\n".join(lines)


def _line(result: Result, method: str, device: int) -> str:
    own = [] if result.dtype == "bfloat16" else [device / result.document["full_bytes"]]
    sizes = (f"{fraction:.1%}" for fraction in (*result.bfloat16(method), *own))
    cells = (shown(task, *result.score(method, task)) for task in result.document["tasks"])
    return f"| `{method}` | {' | '.join((*sizes, *cells))} |"


def difference_table(result: Result, share: str) -> str:
    """All methods at a share beside the full cache, with intervals."""
    tasks = result.document["tasks"]
    lines = [f"| method | {' | '.join(TITLES[task] for task in tasks)} |", "|---|" + "---:|" * len(tasks)]
    for family in result.families:
        for point in result.points(family, share):
            cells = [_difference(task, result.differences(point["method"], task)) for task in tasks]
            lines.append(f"| `{point['method']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _difference(task: str, values: np.ndarray) -> str:
    form = "{:+.3f}" if task in IN_BITS else "{:+.1f}"
    low, high = map(form.format, interval(values))
    return f"{form.format(values.mean())} ({low} to {high})"


def left_out(result: Result) -> str:
    """What cannot be made so small, by share, and what failed; a section of the page, if there is any."""
    lines = []
    for share in result.shares:
        names = [label(p["settings"]) for p in result.document["points"] if p["share"] == share and not p["method"]]
        lines += [f"- {share}: {', '.join(f'`{name}`' for name in names)}"] if names else []
    lines += [f"- `{method}` failed: {why}" for method, why in result.document["failed"].items()]
    return "\n## What cannot be made so small\n\n" + "\n".join(lines) + "\n" if lines else ""


def not_yet(result: Result) -> str:
    """What a run that is still going on has not come to."""
    fits = {p["method"] for p in result.document["points"]} - {""} - set(result.document["scores"])
    names = ", ".join(f"`{method}`" for method in sorted(fits))
    return f"\n## Not yet measured\n\n{names}\n" if names else ""


def draw(result: Result) -> bytes:
    """A PNG: rows are families, columns tasks; each panel has one family in colour, all others grey behind it."""
    tasks, rows = result.document["tasks"], result.families
    figure = Figure(figsize=(17, 2.6 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(tasks), sharex=True, sharey="col", squeeze=False)
    marks = [*result.shares, *SMALLER]
    for family, line in zip(rows, axes, strict=True):
        for task, ax in zip(tasks, line, strict=True):
            _panel(result, family, task, ax)
            ax.set_xscale("log", base=2)
            ax.set_xticks([float(Fraction(mark)) for mark in marks], marks)
            ax.xaxis.set_minor_locator(NullLocator())
            ax.grid(alpha=0.25)
        line[0].set_ylabel(family.replace(" by ", "\nby ").replace(" in ", "\nin "), fontsize=11)
        if result.points(family):
            line[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8.5)
    for task, ax in zip(tasks, axes[0], strict=True):
        ax.set_title(TITLES[task] + (", bits per byte above full" if task in IN_BITS else ", % right"))
        if task in IN_BITS:
            ax.set_yscale("symlog", linthresh=BITS[1])
            ax.yaxis.set_major_locator(FixedLocator(BITS))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter("{x:g}")
            ax.invert_yaxis()
    figure.supxlabel(f"share of the exact cache's bytes that the device holds, both in {result.dtype} (logarithmic)")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _panel(result: Result, family: str, task: str, ax: Any) -> None:
    reference, _ = result.score(FULL, task)
    ax.axhline(reference, color="black", linewidth=0.8)
    for other in result.families:
        for i, curve in enumerate(_curves(result, other, task)):
            if other != family:
                ax.plot(curve.shares, curve.scores, color="0.85", linewidth=0.8, zorder=0)
                continue
            style = {"marker": MARKERS[i % len(MARKERS)], "color": f"C{i % 10}", "markersize": 5, "linewidth": 1.2}
            ax.errorbar(curve.shares, curve.scores, curve.errors, label=curve.name, elinewidth=0.7, alpha=0.9, **style)


class Curve(NamedTuple):
    """One method at several sizes, from the smallest."""

    name: str
    shares: tuple[float, ...]  # of the full cache's bytes, as really taken
    scores: tuple[float, ...]
    errors: tuple[float, ...]


def _curves(result: Result, family: str, task: str) -> list[Curve]:
    """The methods of a family that were measured; a setting that fits several shares is one point."""
    settings = dict.fromkeys(p["settings"] for p in result.points(family))
    curves = []
    for asked in settings:
        sizes = {p["method"]: p["device_bytes"] for p in result.points(family) if p["settings"] == asked}
        measured = []
        for method, size in sizes.items():
            score, error = result.score(method, task)
            if score is not None:
                measured.append((size / result.document["full_bytes"], score, error))
        if measured:
            shares, scores, errors = zip(*sorted(measured), strict=True)
            curves.append(Curve(label(asked), shares, scores, errors))
    return curves


def fractions_row(result: Result, method: str) -> str:
    """A row of `fractions_table`."""
    sizes = (f"{fraction:.1%}" for fraction in result.bfloat16(method))
    cells = (shown(task, *result.score(method, task)) for task in result.document["tasks"])
    return f"| `{method}` | {' | '.join((*sizes, *cells))} |"


def fractions_table(result: Result, methods: Sequence[str]) -> str:
    """Some methods, with their bytes in bfloat16."""
    tasks = result.document["tasks"]
    heads = ["method", "device, bfloat16", "host, bfloat16", *(TITLES[task] for task in tasks)]
    rows = [fractions_row(result, method) for method in methods]
    return "\n".join([f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1), *rows])


def page(result: Result, plot: str | None) -> str:
    """The page, which shows the plot of that name, if there is one."""
    document = result.document
    by_task = "\n\n".join(family_table(result, task) for task in document["tasks"])
    by_share = "\n\n".join(f"### {share}\n\n{share_table(result, share)}" for share in result.shares)
    beside_full = "\n\n".join(f"### {share}\n\n{difference_table(result, share)}" for share in result.shares)
    machine = document["machine"]
    shows = f"\n![quality against bytes]({plot})\n" if plot else ""
    return f"""# Methods at equal bytes: {MODELS.get(document["model"], document["model"])}

`python -m experiments.equal_bytes` measured this on `{document["model"]}`, with contexts of {document["length"]:,}
tokens.

- **Bytes.** Each method has the largest size whose planned bytes on the device fit the fraction of the exact cache's,
  both in {result.dtype}; several settings of one method are alternatives. The columns *bfloat16* say what the same
  settings take of the exact cache where both are held in bfloat16, as caches are in practice. The model computed in
  {document.get("computed_in", "float32")}.
- **Questions** are asked after the context was compressed, except the first of a conversation, which ends the prompt:
  *later questions* are those after it. **Text** is bits per byte above the full cache's.
- **Contexts**: {result.counts()}, of {len(document["seeds"])} seeds together; the windows of text are the same for all
  seeds. Errors are standard errors over contexts, of text those of paired differences.
- **Machine**: {machine["processor"]}, {machine["cores"]} cores, JAX {machine["jax"]}.
{shows}
## Which family where

The best of each family, which is a maximum over its methods and so a little too high, and the family's median.

{by_task}

## All methods

{by_share}

## Beside the full cache

Context by context, what a method scores more or less than the full cache: points, and bits per byte. In brackets 95%
bootstrap intervals of the mean, of contexts drawn anew 10,000 times.

{beside_full}
{left_out(result)}{not_yet(result)}"""


def pages() -> dict[str, str | bytes]:
    """Path -> content: a page for each run, and a plot for each of several shares."""
    found: dict[str, str | bytes] = {}
    for results, name in PAGES.items():
        result = Result(json.loads(results.read_text()))
        plot = f"{name}.png" if len(result.shares) > 1 else None
        found[f"{name}.md"] = page(result, plot)
        if plot is not None:
            found[plot] = draw(result)
    return found
