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
from kvjax.eval.page.intervals import Interval, mean_interval, paired_interval, score_interval
from kvjax.registry.strings import parse_parts

PAGES = {RESULTS: "equal_bytes", RESULTS.with_name("equal_bytes.smollm2.json"): "equal_bytes.smollm2"}
"""File of results -> the name of its page."""

TITLES = {
    "niah": "needles",
    "ruler.vt": "variable tracking",
    "turns": "later questions",
    "ppl": "text",
    "long_answer": "one long answer",
    "niah.essays": "needles in essays",
    "turns.essays": "later questions on essays",
    "humaneval.bits": "HumanEval's solutions",
    "ruler.niah_multikey_1": "one key of many",
}
MODELS = {
    "testbed": "the testbed model",
    "smollm2-135m": "SmolLM2-135M",
    "gemma3-270m": "Gemma 3 270M",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
}
BIT_TASKS = ("ppl", "long_answer", "humaneval.bits")  # tasks measured in bits per byte, above the full cache's
SMALLER_FRACTIONS = ("1/32", "1/64", "1/128")  # ticks for methods that leave nearly everything on the host
BIT_TICKS = (0, 0.01, 0.03, 0.1, 0.3, 1, 3)  # bits per byte above the full cache's; linear up to the second
MARKERS = "osD^v<>P*Xhpd|+"


@dataclasses.dataclass(frozen=True)
class Result:
    """The results in a document of `experiments.equal_bytes`."""

    document: Mapping[str, Any]

    @property
    def fractions(self) -> list[str]:
        """The fractions of the exact cache's bytes, largest first."""
        return sorted({p["share"] for p in self.document["points"]}, key=Fraction, reverse=True)

    @property
    def families(self) -> list[str]:
        """The families with a measured method, in the order of the settings."""
        return list(dict.fromkeys(p["family"] for p in self.points()))

    @property
    def dtype(self) -> str:
        """The dtype in which the fractions' bytes are counted; documents from before November 2026 do not name it."""
        return self.document.get("bytes_in", "float32")

    def bfloat16(self, method: str) -> tuple[float, float]:
        """A method's bytes on the device and on the host, as fractions of the exact cache's, both in bfloat16."""
        return tuple(self.document["bfloat16"][method])

    @property
    def title(self) -> str:
        """The model's name."""
        return MODELS.get(self.document["model"], self.document["model"])

    def points(self, family: str | None = None, fraction: str | None = None) -> list[Mapping[str, Any]]:
        """The measured points of a family, a fraction, or both."""
        measured = [p for p in self.document["points"] if p["method"] in self.document["scores"]]
        return [p for p in measured if family in (None, p["family"]) and fraction in (None, p["share"])]

    def contexts(self, method: str, task: str) -> np.ndarray:
        """The scores of all contexts of all seeds."""
        by_seed = self.document["scores"].get(method, {}).get(task, {})
        return np.concatenate([by_seed[seed] for seed in sorted(by_seed)]) if by_seed else np.zeros(0)

    def has_scores(self, method: str, task: str) -> bool:
        """Whether a method was asked about a task; in a run that goes on, one may lack some."""
        return task in self.document["scores"].get(method, {})

    def score(self, method: str, task: str) -> tuple[float | None, Interval | None]:
        """(percent right, or bits per byte above the full cache's; the 95% interval over contexts)."""
        values = self.contexts(method, task)
        if not len(values):
            return None, None
        if task not in BIT_TASKS:
            return float(100 * values.mean()), _in_percent(score_interval(values))
        mean, interval = self.difference(method, task)
        return mean, None if method == FULL else interval

    def counts(self) -> str:
        """The number of contexts of each task, in words."""
        return ", ".join(f"{len(self.contexts(FULL, task))} of {TITLES[task]}" for task in self.document["tasks"])

    def difference(self, method: str, task: str) -> tuple[float, Interval | None]:
        """A method's `paired_difference` to the full cache."""
        return self.paired_difference(method, FULL, task)

    def paired_difference(self, method: str, other: str, task: str) -> tuple[float, Interval | None]:
        """(a method's mean score minus another's, percentage points or bits per byte; its 95% interval)."""
        own, others = self.contexts(method, task), self.contexts(other, task)
        if task in BIT_TASKS:
            return float((own - others).mean()), mean_interval(own - others)
        return float(100 * (own - others).mean()), _in_percent(paired_interval(own, others))


def _in_percent(interval: Interval) -> Interval:
    return Interval(100 * interval.low, 100 * interval.high)


def format_score(task: str, score: float | None, interval: Interval | None = None) -> str:
    """A score with its interval, for a cell."""
    if score is None:
        return ""
    form, end = ("{:+.3f}", "{:+.3f}") if task in BIT_TASKS else ("{:.1f}", "{:.0f}")
    ends = "" if interval is None else f" ({end.format(interval.low)} to {end.format(interval.high)})"
    return form.format(score) + ends


def short_name(settings: str) -> str:
    """A method without its parameters."""
    return " + ".join(part.name for part in parse_parts(settings.split(";")[0].strip()))


def family_table(result: Result, task: str) -> str:
    """The best method and the median of each family at each fraction, for one task."""
    lines = [f"| {TITLES[task]} | {' | '.join(result.fractions)} |", "|---" * (len(result.fractions) + 1) + "|"]
    for family in result.families:
        cells = [_best(result, task, result.points(family, fraction)) for fraction in result.fractions]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _best(result: Result, task: str, points: Sequence[Mapping[str, Any]]) -> str:
    found = [(result.score(p["method"], task), p) for p in points]
    found = [((score, interval), p) for (score, interval), p in found if score is not None]
    if not found:
        return ""
    (score, interval), best = max(found, key=lambda f: -f[0][0] if task in BIT_TASKS else f[0][0])
    middle = statistics.median(score for (score, _), _ in found)
    text = format_score(task, score, interval)
    return f"**{text}** {short_name(best['settings'])}; median {format_score(task, middle)}"


def fraction_table(result: Result, fraction: str) -> str:
    """All methods at a fraction, by family."""
    tasks = result.document["tasks"]
    own = [] if result.dtype == "bfloat16" else [f"device, {result.dtype}"]
    heads = ["method", "device, bfloat16", "host, bfloat16", *own, *(TITLES[t] for t in tasks)]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    lines.append(method_row(result, FULL, result.document["full_bytes"]))
    for family in result.families:
        points = result.points(family, fraction)
        lines += [f"| *{family}* |" + " |" * (len(heads) - 1)] if points else []
        lines += [method_row(result, p["method"], p["device_bytes"]) for p in points]
    return "\n".join(lines)


def difference_table(result: Result, fraction: str) -> str:
    """The differences of all methods at a fraction from the full cache, with intervals."""
    tasks = result.document["tasks"]
    lines = [f"| method | {' | '.join(TITLES[task] for task in tasks)} |", "|---|" + "---:|" * len(tasks)]
    for family in result.families:
        for point in result.points(family, fraction):
            cells = [
                format_difference(task, *result.difference(point["method"], task))
                if result.has_scores(point["method"], task)
                else ""
                for task in tasks
            ]
            lines.append(f"| `{point['method']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_difference(task: str, mean: float, interval: Interval | None) -> str:
    """A difference of scores with its interval, for a cell."""
    form = "{:+.3f}" if task in BIT_TASKS else "{:+.1f}"
    return form.format(mean) + ("" if interval is None else " ({} to {})".format(*map(form.format, interval)))


def too_large_section(result: Result) -> str:
    """The section of methods that are too large, by fraction, and of failures; "" where there are none."""
    lines = []
    for fraction in result.fractions:
        names = [
            short_name(p["settings"])
            for p in result.document["points"]
            if p["share"] == fraction and not p["method"] and "why" not in p  # `failed` has those with a reason
        ]
        lines += [f"- {fraction}: {', '.join(f'`{name}`' for name in names)}"] if names else []
    lines += [f"- `{method}` failed: {why}" for method, why in result.document["failed"].items()]
    return "\n## Methods that cannot be so small\n\n" + "\n".join(lines) + "\n" if lines else ""


def unmeasured_section(result: Result) -> str:
    """The section of methods that an unfinished run has not measured; "" where there are none."""
    fits = {p["method"] for p in result.document["points"]} - {""} - set(result.document["scores"])
    names = ", ".join(f"`{method}`" for method in sorted(fits))
    return f"\n## Not yet measured\n\n{names}\n" if names else ""


def draw_plot(result: Result) -> bytes:
    """A PNG with a row per family and a column per task; a panel has one family in color and the others in gray."""
    tasks, rows = result.document["tasks"], result.families
    figure = Figure(figsize=(17, 2.6 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(tasks), sharex=True, sharey="col", squeeze=False)
    marks = [*result.fractions, *SMALLER_FRACTIONS]
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
        ax.set_title(TITLES[task] + (", bits per byte above full" if task in BIT_TASKS else ", % right"))
        if task in BIT_TASKS:
            ax.set_yscale("symlog", linthresh=BIT_TICKS[1])
            ax.yaxis.set_major_locator(FixedLocator(BIT_TICKS))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter("{x:g}")
            ax.invert_yaxis()
    figure.supxlabel(f"fraction of the exact cache's bytes on the device, both in {result.dtype} (logarithmic)")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _panel(result: Result, family: str, task: str, ax: Any) -> None:
    reference, _ = result.score(FULL, task)
    ax.axhline(reference, color="black", linewidth=0.8)
    for other in result.families:
        for i, curve in enumerate(_curves(result, other, task)):
            if other != family:
                ax.plot(curve.fractions, curve.scores, color="0.85", linewidth=0.8, zorder=0)
                continue
            style = {"marker": MARKERS[i % len(MARKERS)], "color": f"C{i % 10}", "markersize": 5, "linewidth": 1.2}
            ax.errorbar(
                curve.fractions, curve.scores, curve.reaches, label=curve.name, elinewidth=0.7, alpha=0.9, **style
            )


class Curve(NamedTuple):
    """One method at several sizes, smallest first."""

    name: str
    fractions: tuple[float, ...]  # of the full cache's bytes, as measured
    scores: tuple[float, ...]
    reaches: np.ndarray  # [2 n], how far each interval reaches below and above


def _curves(result: Result, family: str, task: str) -> list[Curve]:
    """The measured methods of a family; a setting that fits several fractions is one point."""
    families_settings = dict.fromkeys(p["settings"] for p in result.points(family))
    curves = []
    for settings in families_settings:
        sizes = {p["method"]: p["device_bytes"] for p in result.points(family) if p["settings"] == settings}
        measured = []
        for method, size in sizes.items():
            score, interval = result.score(method, task)
            if score is not None:
                low, high = interval or (score, score)
                measured.append((size / result.document["full_bytes"], score, score - low, high - score))
        if measured:
            fractions, scores, *reaches = zip(*sorted(measured), strict=True)
            curves.append(Curve(short_name(settings), fractions, scores, np.array(reaches)))
    return curves


def method_row(result: Result, method: str, device_bytes: int | None = None) -> str:
    """A method's sizes in bfloat16, in the results' own dtype where `device_bytes` is given in another, and scores."""
    has_own_dtype = device_bytes is not None and result.dtype != "bfloat16"
    own = [device_bytes / result.document["full_bytes"]] if has_own_dtype else []
    sizes = (f"{fraction:.1%}" for fraction in (*result.bfloat16(method), *own))
    cells = (format_score(task, *result.score(method, task)) for task in result.document["tasks"])
    return f"| `{method}` | {' | '.join((*sizes, *cells))} |"


def method_table(result: Result, methods: Sequence[str]) -> str:
    """Some methods, with their bytes in bfloat16."""
    tasks = result.document["tasks"]
    heads = ["method", "device, bfloat16", "host, bfloat16", *(TITLES[task] for task in tasks)]
    rows = [method_row(result, method) for method in methods]
    return "\n".join([f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1), *rows])


def page(result: Result, plot: str | None) -> str:
    """The page; `plot` is the name of its picture, if there is one."""
    document = result.document
    by_task = "\n\n".join(family_table(result, task) for task in document["tasks"])
    by_fraction = "\n\n".join(f"### {fraction}\n\n{fraction_table(result, fraction)}" for fraction in result.fractions)
    by_difference = "\n\n".join(
        f"### {fraction}\n\n{difference_table(result, fraction)}" for fraction in result.fractions
    )
    machine = document["machine"]
    picture = f"\n![quality against bytes]({plot})\n" if plot else ""
    return f"""# Methods at equal bytes: {result.title}

`python -m experiments.equal_bytes` measured this on `{document["model"]}`, with contexts of {document["length"]:,}
tokens.

- **Bytes.** Each method has the largest size whose planned bytes on the device fit the fraction of the exact cache's,
  both in {result.dtype}; several settings of one method are alternatives. The columns *bfloat16* say what the same
  settings take of the exact cache where both are stored in bfloat16, as caches are in practice. The model computed in
  {document.get("computed_in", "float32")}.
- **Questions** are asked after the context was compressed, except the first of a conversation, which ends the prompt:
  *later questions* are those after it. **Text** is bits per byte above the full cache's.
- **Contexts**: {result.counts()}, of {len(document["seeds"])} seeds together; the windows of text are the same for all
  seeds. In brackets are 95% intervals over contexts: Wilson's, and of text Student's of paired differences.
- **Machine**: {machine["processor"]}, {machine["cores"]} cores, JAX {machine["jax"]}.
{picture}
## Which family where

The table has the best method of each family, a maximum that is biased upwards, and the family's median.

{by_task}

## All methods

{by_fraction}

## Differences from the full cache

Differences are paired by context: percentage points, or bits per byte. In brackets are 95% intervals: Newcombe's for
paired proportions (method 10), and of text Student's.

{by_difference}
{too_large_section(result)}{unmeasured_section(result)}"""


def pages() -> dict[str, str | bytes]:
    """Path -> content: a page for each run, and a plot for each run with several fractions."""
    found: dict[str, str | bytes] = {}
    for results, name in PAGES.items():
        result = Result(json.loads(results.read_text()))
        plot = f"{name}.png" if len(result.fractions) > 1 else None
        found[f"{name}.md"] = page(result, plot)
        if plot is not None:
            found[plot] = draw_plot(result)
    return found
