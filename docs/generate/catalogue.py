"""The answer to "which method for me": tables and pictures of what `python -m experiments.catalogue` measured."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from docs.generate import equal_bytes
from docs.generate.equal_bytes import BIT_TASKS, TITLES, Result, format_score
from experiments import catalogue
from experiments.equal_bytes import FULL, RESULTS
from kvjax.eval.page.intervals import Interval

CHOSEN = RESULTS.with_name("readme.smollm2.json")  # chosen methods, with more contexts than the catalogue's

USES = {
    "turns": "many questions about one text",
    "turns.essays": "many questions about one text",
    "ruler.niah_multikey_1": "one key of many",
    "ruler.vt": "a chain of variables",
    "ppl": "a long text goes on",
    "long_answer": "one long answer",
    "humaneval.bits": "code goes on",
}
"""Task -> what someone does who cares for it, in the order of the table."""

NAMED = 3  # methods that a table or a picture names for each fraction
LEAST_HOST_FRACTION = 0.01  # of the exact cache's bytes: a method with less on the host is one of the device alone
FRONT_SIZE = (12, 4)  # methods on the device alone, and with host memory, that are measured on all models
LEAST_TICK_DISTANCE = Fraction(9, 10)  # of a fraction from the next larger one, so that their labels do not touch
NEAR_BITS = 0.01  # bits per byte above the exact cache's
FEW_ANSWERS = 10  # percent
PAGE_TITLES = {None: "The catalogue", catalogue.FRONT: "The front", catalogue.FORMS: "Forms of one method"}
"""Kind of run -> what its page is called."""


def read_results(kind: str | None = None) -> dict[str, Result]:
    """Reads the runs of catalogue.toml of one kind that have records: name -> result.

    The bytes of forms are known before their scores, so they need none.
    """
    found = {}
    for name, run in catalogue.read_declared(None).items():
        if run.get("kind") != kind or not catalogue.fitted_path(run).exists():
            continue
        result = Result(catalogue.sum_up(run))
        if result.document["tasks"] or kind == catalogue.FORMS:
            found[name] = result
    return found


def rank_methods(result: Result, task: str, fraction: str) -> list[Mapping[str, Any]]:
    """The methods at a fraction that have scores in a task, the best first."""
    points = {p["method"]: p for p in result.points(fraction=fraction)}  # lines of two families may fit alike
    means = {method: result.contexts(method, task).mean() for method in points if result.has_scores(method, task)}
    sign = 1 if task in BIT_TASKS else -1
    # Fewer bytes decide between equals.
    return sorted((points[m] for m in means), key=lambda p: (sign * means[p["method"]], p["device_bytes"]))


def chosen_table() -> str:
    """The chosen methods, from the most bytes on the device to the fewest."""
    result = Result(json.loads(CHOSEN.read_text()))
    methods = sorted(result.document["scores"], key=lambda method: -result.bfloat16(method)[0])
    return equal_bytes.method_table(result, methods)


def find_uses(result: Result) -> list[str]:
    """The tasks that a result has, in the order of the table; the first is that of the picture."""
    return [task for task in USES if task in result.document["tasks"]]


def winners_table(result: Result) -> str:
    """For each use and fraction the best methods on the device alone, and the best with the rest on the host.

    The first row of a use says how many others on the device the contexts do not tell from the first.
    """
    fractions = result.fractions
    lines = [f"| | {' | '.join(f'{x} of the bytes' for x in fractions)} |", "|---" * (len(fractions) + 1) + "|"]
    for task in find_uses(result):
        alone, with_host = zip(*(_rank_by_memory(result, task, fraction) for fraction in fractions), strict=True)
        more = [f"not told apart from the first: {_count_alike(result, task, points)} more" for points in alone]
        lines.append(f"| **{USES[task]}**; exact cache {_format_exact(result, task)} | {' | '.join(more)} |")
        rows = [(str(rank + 1), [points[rank : rank + 1] for points in alone]) for rank in range(NAMED)]
        for name, row in [*rows, ("with the host", [points[:1] for points in with_host])]:
            cells = [_format_method(result, task, points) for points in row]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _count_alike(result: Result, task: str, points: Sequence[Mapping[str, Any]]) -> int:
    return sum(not is_worse(result, task, point["method"], points[0]["method"]) for point in points[1:])


def uses_host(result: Result, method: str) -> bool:
    """Whether a method holds keys and values in host memory."""
    return result.bfloat16(method)[1] > LEAST_HOST_FRACTION


def _format_exact(result: Result, task: str) -> str:
    return f"{result.contexts(FULL, task).mean():.3f} bits" if task in BIT_TASKS else _format_score(result, task, FULL)


def _format_method(
    result: Result,
    task: str,
    points: Sequence[Mapping[str, Any]],
    is_short: bool = False,
    has_interval: bool = True,
) -> str:
    """The one method of `points` with its score; its parameters and the interval may be left out. "" for none."""
    if not points:
        return ""
    (point,) = points
    name = equal_bytes.short_name(point["settings"]) if is_short else f"`{point['method']}`"
    return f"{name} {_format_score(result, task, point['method'], has_interval)}"


def _rank_by_memory(result: Result, task: str, fraction: str) -> tuple[list[Mapping[str, Any]], ...]:
    """The methods on the device alone, and those with host memory, each the best first."""
    ranked = rank_methods(result, task, fraction)
    alone = [point for point in ranked if not uses_host(result, point["method"])]
    return alone, [point for point in ranked if point not in alone]


def _format_score(result: Result, task: str, method: str, has_interval: bool = True) -> str:
    score, interval = result.score(method, task)
    if task in BIT_TASKS or score is None or interval is None:
        return format_score(task, score)
    return f"{score:.0f}" + (f" ({interval.low:.0f}–{interval.high:.0f})" if has_interval else "")


def is_worse(result: Result, task: str, method: str, than: str) -> bool:
    """Whether the 95% interval of two methods' difference, paired by context, excludes 0 on the worse side."""
    interval = result.paired_difference(method, than, task)[1]
    if interval is None:
        return False
    return interval.low > 0 if task in BIT_TASKS else interval.high < 0


def failures_table(result: Result) -> str:
    """How many methods of each family answer less than the exact cache, by fraction, for the use of the picture."""
    pictured = find_uses(result)[0]
    lines = [f"| family | {' | '.join(result.fractions)} |", "|---|" + "---:|" * len(result.fractions)]
    for family in [*result.families, "all"]:
        cells = []
        for fraction in result.fractions:
            points = [p for p in rank_methods(result, pictured, fraction) if family in ("all", p["family"])]
            worse = [p for p in points if is_worse(result, pictured, p["method"], FULL)]
            cells.append(f"{len(worse)} of {len(points)}" if points else "")
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def describe_code(result: Result) -> str:
    """Says at each fraction how many methods continue code nearly as the exact cache does, and answer few questions."""
    code, questions = "humaneval.bits", "turns.essays"
    lines = []
    for fraction in result.fractions:
        points = rank_methods(result, code, fraction)
        near = [p["method"] for p in points if (result.score(p["method"], code)[0] or 0) < NEAR_BITS]
        few = [method for method in near if (result.score(method, questions)[0] or 0) < FEW_ANSWERS]
        lines.append(
            f"- **Code at {fraction}.** {len(near)} of {len(points)} settings add less than {NEAR_BITS} bits; "
            f"{len(few)} of these answer less than {FEW_ANSWERS}% of the later questions."
        )
    return "\n".join(lines)


def best_tables(fronts: Sequence[Result]) -> str:
    """A `best_table` for each use that a front has been asked about."""
    by_task = {task: [result for result in fronts if task in result.document["tasks"]] for task in USES}
    return "\n\n".join(best_table(with_task, task) for task, with_task in by_task.items() if with_task)


def best_table(results: Sequence[Result], task: str) -> str:
    """The best methods on several models: a row for each fraction of each, with the paired lead of the first."""
    lines = [
        f"| {USES[task]} | exact cache | best | next best | its lead | best with the host |",
        "|---|---:|---|---|---:|---|",
    ]
    for result in results:
        for fraction in result.fractions:
            alone, with_host = _rank_by_memory(result, task, fraction)
            if not alone and not with_host:
                continue
            best = _format_method(result, task, alone[:1], is_short=True)
            # The lead over it has an interval.
            next_best = _format_method(result, task, alone[1:2], is_short=True, has_interval=False)
            hosted = _format_method(result, task, with_host[:1], is_short=True)
            lead = ""
            if len(alone) > 1:
                first, second = (p["method"] for p in alone[:2])
                lead = _format_lead(task, *result.paired_difference(first, second, task))
            cells = [f"{result.title} {fraction}", _format_exact(result, task), best, next_best, lead, hosted]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_lead(task: str, mean: float, interval: Interval | None) -> str:
    if task in BIT_TASKS or interval is None:
        return equal_bytes.format_difference(task, mean, interval)
    return f"{mean:+.0f} ({interval.low:+.0f} to {interval.high:+.0f})"


def front_tables(result: Result) -> str:
    """A `front_table` for each use that a front has been asked about on a model."""
    return "\n\n".join(front_table(result, task) for task in find_uses(result))


def front_table(result: Result, task: str) -> str:
    """A front's methods in one use of a model: a column for each fraction, the best on average first.

    Bold cells are not told apart from the exact cache; methods with host memory come last, and say so.
    """
    cells: dict[str, dict[str, str]] = {}
    scores: dict[str, list[float]] = {}
    hosted: set[str] = set()
    for fraction in result.fractions:
        for point in rank_methods(result, task, fraction):
            line, method = point["settings"], point["method"]
            if task in BIT_TASKS:  # with its interval, since one text that is lost moves a mean far
                text = equal_bytes.format_difference(task, *result.paired_difference(method, FULL, task))
            else:
                text = _format_score(result, task, method)
            cells.setdefault(line, {})[fraction] = text if is_worse(result, task, method, FULL) else f"**{text}**"
            scores.setdefault(line, []).append(result.contexts(method, task).mean())
            if uses_host(result, method):
                hosted.add(line)
    sign = 1 if task in BIT_TASKS else -1
    ordered = sorted(cells, key=lambda line: (line in hosted, sign * np.mean(scores[line])))
    columns = " | ".join(result.fractions)
    lines = [f"| {result.title}, {TITLES[task]} | {columns} |", "|---|" + "---:|" * len(result.fractions)]
    lines.append(f"| `{FULL}` |" + f" {_format_exact(result, task)} |" * len(result.fractions))
    for line in ordered:
        name = equal_bytes.short_name(line) + (", host" if line in hosted else "")
        lines.append(f"| {name} | {' | '.join(cells[line].get(fraction, '') for fraction in result.fractions)} |")
    return "\n".join(lines)


def choose_front(results: Sequence[Result], most: tuple[int, int] = FRONT_SIZE) -> list[str]:
    """Chooses the lines of `equal_bytes.toml` that all models are asked about.

    The rule was written before any larger model ran. Each task of each result at each fraction has a queue of methods,
    the best first. The queues take turns; one whose turn it is gives its first method that no other has given. They do
    so for the methods of the device alone, and then for those that use host memory.

    Args:
      results: complete runs at equal bytes.
      most: how many methods are chosen on the device alone, and with host memory.
    """
    queues = [
        (result, rank_methods(result, task, fraction))
        for fraction in dict.fromkeys(fraction for result in results for fraction in result.fractions)
        for task in USES
        for result in results
        if task in find_uses(result)
    ]
    chosen: dict[str, None] = {}
    for with_host, number in zip((False, True), most, strict=True):
        kind = [[p["settings"] for p in points if uses_host(r, p["method"]) == with_host] for r, points in queues]
        enough = len(chosen) + number
        while any(kind) and len(chosen) < enough:
            for queue in kind:
                while queue and queue[0] in chosen:
                    queue.pop(0)
                if queue and len(chosen) < enough:
                    chosen[queue.pop(0)] = None
    return list(chosen)


def draw_picture(result: Result) -> bytes:
    """A PNG: later questions answered against bytes on the device.

    The best of each fraction have names, and so has the best with host memory, which is hollow; the others are gray.
    """
    pictured = find_uses(result)[0]
    figure = Figure(figsize=(9.2, 5.2), layout="constrained")
    ax = figure.subplots()
    exact, _ = result.score(FULL, pictured)
    ax.axhline(exact, color="0.6", linewidth=0.8, zorder=0)
    ax.annotate(
        "the exact cache",
        (0.55, exact),
        (6, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=8,
    )
    number, labels = 0, {}
    drawn: set[str] = set()  # a small method fits several fractions
    for fraction in result.fractions:
        alone, with_host = _rank_by_memory(result, pictured, fraction)
        named = [*alone[:NAMED], *with_host[:1]]
        points = [p for p in (*alone, *with_host) if p["method"] not in drawn]
        drawn |= {p["method"] for p in points}
        for point in points:
            device, _ = result.bfloat16(point["method"])
            score, interval = result.score(point["method"], pictured)
            face = "white" if uses_host(result, point["method"]) else None
            if point not in named:
                ax.plot(device, score, "o", ms=4, color="0.75", mfc=face or "0.75", zorder=1)
                continue
            low, high = interval or Interval(score, score)
            name = f"{number + 1}  {point['method']}: {score:.0f}%"
            style = {
                "color": f"C{number % 10}",
                "mfc": face or f"C{number % 10}",
                "marker": "o",
                "ms": 7,
                "ls": "",
                "zorder": 3,
            }
            ax.errorbar(
                [device], [score], [[score - low], [high - score]], label=name, elinewidth=0.8, capsize=2, **style
            )
            number += 1
            # Labels of nearly one place would lie over each other.
            places = [(x, y) for x, y in labels if abs(x - device) < 0.01 and abs(y - score) < 4]
            labels.setdefault(places[0] if places else (device, score), []).append(str(number))
    for place, numbers in labels.items():
        ax.annotate(", ".join(numbers), place, (6, 3), textcoords="offset points", fontsize=8)
    ticks: list[str] = []
    for tick in sorted({*result.fractions, "1/16", "1/32"}, key=Fraction, reverse=True):
        if not ticks or Fraction(tick) < LEAST_TICK_DISTANCE * Fraction(ticks[-1]):
            ticks.append(tick)
    ax.set(xscale="log", ylim=(-4, 104), yticks=range(0, 101, 20))
    ax.set_xticks([float(Fraction(tick)) for tick in ticks], ticks)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("bytes of the cache on the device, of the exact cache's\nboth in bfloat16 (logarithmic)")
    ax.set_ylabel("later questions answered right, %")
    contexts, methods = len(result.contexts(FULL, pictured)), len(result.document["scores"]) - 1
    title = f"{result.title}, {result.document['length']:,} tokens of essays, {methods} settings"
    bars = f"bars are 95% intervals over {contexts} contexts; hollow: the rest is on the host"
    ax.set_title(f"{title}\n{bars}", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=7.5, frameon=False, ncols=1, loc="center left", bbox_to_anchor=(1.06, 0.5))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()


def summary(result: Result) -> str:
    """Sums up a run: contexts, winners, failures, and what both uses say of code."""
    where = "; ".join(["", *result.document["machines"]])
    both = {"humaneval.bits", "turns.essays"} <= set(result.document["tasks"])
    return f"""{len(result.document["scores"]) - 1} settings; contexts: {result.counts()}{where}.

{winners_table(result)}

How many methods of each family answer less than the exact cache, by an interval that excludes 0:

{failures_table(result)}
{f"{chr(10)}{describe_code(result)}{chr(10)}" if both else ""}"""


def forms_table(result: Result) -> str:
    """The forms of each method: bytes, scores, and the differences from the method's first form with intervals."""
    tasks, full = find_uses(result), result.document["full_bytes"]
    heads = ["form", "of a prompt", "half an answer", *(equal_bytes.TITLES[task] for task in tasks)]
    exact = ["100%", "100%", *(_format_exact(result, task) for task in tasks)]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1), f"| `{FULL}` | {' | '.join(exact)} |"]
    families: dict[str, list[Mapping[str, Any]]] = {}
    for point in result.document["points"]:
        if point["method"]:
            families.setdefault(point["family"], []).append(point)
    for first, *others in families.values():
        for point in (first, *others):
            cells = [f"{point[name] / full:.1%}" for name in ("device_bytes", "answer_bytes")]
            for task in tasks:
                score = format_score(task, result.score(point["method"], task)[0])
                if score and point in others and len(result.contexts(first["method"], task)):
                    difference = result.paired_difference(point["method"], first["method"], task)
                    score += f"; {equal_bytes.format_difference(task, *difference)}"
                cells.append(score)
            lines.append(f"| `{point['method']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def forms_page(name: str, result: Result) -> str:
    """The site's page of a run whose families are forms of one method."""
    length = result.document["length"]
    return f"""# Forms of one method: {result.title}, {length:,} tokens

`python -m experiments.catalogue --only {name}` measured this. The first form of a method is kvjax's default; others
follow its paper or its public code, or are asked for. Bytes are those on the device, as parts of the exact cache's,
both in bfloat16: of a prompt of {length:,} tokens, and of a prompt of {length // 2} tokens with an answer of as many.
Scores are percent right, and bits per byte above the exact cache's. Behind a semicolon stand the differences from the
method's first form, paired by context, with 95% intervals; empty cells were not measured.

Contexts: {result.counts() or "none yet"}{"; ".join(["", *result.document["machines"]])}.

{forms_table(result)}
"""


def page(name: str, result: Result, title: str = PAGE_TITLES[None]) -> str:
    """The site's page of a run at equal bytes."""
    tables = "\n\n".join(f"## {x} of the bytes\n\n{equal_bytes.fraction_table(result, x)}" for x in result.fractions)
    gaps = "\n\n".join(f"### {x} of the bytes\n\n{equal_bytes.difference_table(result, x)}" for x in result.fractions)
    text, calibrated = result.document.get("tables"), ""
    if text:
        calibrated = (
            f" Tables of methods\nwere calibrated on {text['contexts']} contexts of {text['tokens']:,} tokens of "
            "documentation and source code of Python's library."
        )
    return f"""# {title}: {result.title}, {result.document["length"]:,} tokens

`python -m experiments.catalogue --only {name}` measured this: methods at the largest size whose planned bytes on
the device fit a fraction of the exact cache's, both in bfloat16. Questions come after the compression; 95% intervals
over contexts stand in brackets: Wilson's, and of bits per byte Student's of differences paired by context.{calibrated}

![Later questions against bytes](catalogue.{name}.png)

{summary(result)}
{tables}

## Differences from the exact cache, paired by context

{gaps}
{equal_bytes.too_large_section(result)}"""


def menu() -> list[dict[str, str]]:
    """The entries of the site's menu: title -> path."""
    return [
        {f"{title}, {result.title}, {result.document['length']:,} tokens": f"catalogue.{name}.md"}
        for kind, title in PAGE_TITLES.items()
        for name, result in read_results(kind).items()
    ]


def pages() -> dict[str, str | bytes]:
    """Path -> content: a page for each run with records, and a picture for each at equal bytes."""
    made: dict[str, str | bytes] = {}
    for kind, title in PAGE_TITLES.items():
        for name, result in read_results(kind).items():
            if kind == catalogue.FORMS:
                made[f"catalogue.{name}.md"] = forms_page(name, result)
                continue
            made[f"catalogue.{name}.md"] = page(name, result, title)
            made[f"catalogue.{name}.png"] = draw_picture(result)
    return made
