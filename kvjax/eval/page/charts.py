"""What the plots of a run show: pairs of axes, each with words that say the same; `plots` writes them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from kvjax.eval.page import summary
from kvjax.eval.page.summary import Record, Row

INK = "#1a1c1f"  # becomes the colour of the page's text
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe & Ito's, those seen on any ground
MARKERS = ("s", "^", "D", "v", "P", "X", "<")  # 6 colours x 7 markers: 42 methods without repetition
MAP = LinearSegmentedColormap.from_list("needles", ["#0b2545", "#3b6ea5", "#dceaf7"])  # one hue, by lightness
PERCENT = FuncFormatter(lambda x, _: f"{100 * x:.0f}")
SCORE = "score, 0 to 100"
MOST_DEPTHS, MOST_NUMBERS = 12, 40  # rows of a heat map, and cells up to which they hold numbers


@dataclasses.dataclass(frozen=True)
class Style:
    """How a method is drawn everywhere."""

    colour: str
    marker: str


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes: `alt` says in words what it shows; draw(axes) draws it; size in inches."""

    title: str
    alt: str
    draw: Callable[[Axes], None]
    size: tuple[float, float] = (4.2, 3.2)


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """A colour and marker for each method, in this order; the exact one is drawn in ink."""
    others = [m for m in methods if m != summary.REFERENCE]
    found = {m: Style(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, m in enumerate(others)}
    return {m: found.get(m, Style(INK, "o")) for m in methods}


def gid(text: str) -> str:
    """An id that carries the words of a tooltip through matplotlib."""
    return f"point-{text.encode().hex()}"


def _measures(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """(family, "score" or "bits", its rows)"""
    pairs = ((f, m) for f in summary.ordered(rows, "task") for m in ("score", "bits"))
    every = ((f, m, [r for r in rows if r["task"] == f and r[m] is not None]) for f, m in pairs)
    return [x for x in every if x[2]]


SIZE = "bytes on the device, % of the exact cache's, both in bfloat16"


def _label(measure: str) -> str:
    return SCORE if measure == "score" else "bits per byte (less is better)"


def _value(row: Row, measure: str) -> str:
    show = (lambda x: f"{100 * x:.1f}") if measure == "score" else (lambda x: f"{x:.3f}")
    error = row[f"{measure}_error"]
    return show(row[measure]) + (f" ± {show(error)}" if error is not None else "")


def tradeoffs(rows: Sequence[Row], look: dict[str, Style]) -> list[Panel]:
    """Quality against bytes on the device, one panel per family of tasks; rows of one length."""

    def panel(family: str, measure: str, own: list[Row]) -> Panel:
        def draw(ax: Axes) -> None:
            _frontier(ax, own, measure)
            for r in own:
                _point(ax, [r], "device_percent", measure, look[r["method"]])
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xlabel(wrapped(f"{SIZE} (logarithmic)", 48))
            _finish(ax, measure)
            most = max(100, *(r["device_percent"] for r in own))
            ax.spines["bottom"].set_bounds(ax.get_xlim()[0], most)

        seen = "; ".join(f"{r['method']}: {_value(r, measure)} at {r['device_percent']:.1f}%" for r in own)
        return Panel(family, f"{family}, {_label(measure)}, against {SIZE}. {seen}", draw)

    sized = [r for r in summary.by_family(rows) if r["device_percent"]]
    return [panel(*m) for m in _measures(sized)]


def _frontier(ax: Axes, rows: Sequence[Row], measure: str) -> None:
    """The steps between the methods that no other beats in both quality and bytes."""
    sign = 1 if measure == "score" else -1
    best: list[Row] = []
    for r in sorted(rows, key=lambda r: (r["device_percent"], -sign * r[measure])):
        if not best or sign * r[measure] > sign * best[-1][measure]:
            best.append(r)
    x, y = [r["device_percent"] for r in best], [r[measure] for r in best]
    ax.step(x, y, where="post", color=INK, alpha=0.3, linewidth=1, zorder=1)


def _point(ax: Axes, rows: Sequence[Row], x: str, measure: str, style: Style, line: bool = False) -> None:
    at, y = [r[x] for r in rows], [r[measure] for r in rows]
    error = [r[f"{measure}_error"] or 0 for r in rows]
    ax.errorbar(at, y, error, fmt="none", ecolor=style.colour, elinewidth=1, alpha=0.6, zorder=2)
    if line:
        ax.plot(at, y, color=style.colour, linewidth=1, alpha=0.7, zorder=2)
    for i, r in enumerate(rows):
        (mark,) = ax.plot(at[i], y[i], style.marker, color=style.colour, markersize=6.5, markeredgewidth=0, zorder=3)
        where = f"{r['device_percent']:.1f}% of full" if x == "device_percent" else f"{r['length']:,} tokens"
        mark.set_gid(gid(f"{r['method']}: {_value(r, measure)}, {where}"))


def _finish(ax: Axes, measure: str) -> None:
    ax.set_ylabel(_label(measure))
    ax.grid(axis="y")
    ax.margins(0.08)
    if measure == "score":
        percents(ax.yaxis)


def percents(axis: Axis, whole: float = 1.0) -> None:
    """Makes what is drawn an axis of percents: ticks at round numbers from 0 to 100, where its line ends.

    There is room beyond, as markers at 0 and 100 would be cut in half. To be called when all is drawn.

    Args:
      axis: of `ax.xaxis` or `ax.yaxis`.
      whole: what 100% is among the numbers that are drawn.
    """
    low, high = sorted(axis.get_view_interval())
    low, high = max(low, -0.04 * whole), min(high, 1.04 * whole)
    inside = max(low, 0.0), min(high, whole)
    ticks = MaxNLocator(8, steps=(1, 2, 5, 10)).tick_values(*(100 * x / whole for x in inside))
    # Half a thousandth of a point, as a limit may lie that much beside a tick.
    ticks = [round(t, 6) for t in ticks if 100 * inside[0] / whole - 5e-4 <= t <= 100 * inside[1] / whole + 5e-4]
    axis.set_ticks([t * whole / 100 for t in ticks], [f"{t:g}" for t in ticks])
    ax, is_x = axis.axes, isinstance(axis, XAxis)
    (ax.set_xlim if is_x else ax.set_ylim)(low, high)
    if not ax.spines["right" if is_x else "top"].get_visible():  # a frame on all sides is not opened
        ax.spines["bottom" if is_x else "left"].set_bounds(*inside)


def by_length(rows: Sequence[Row], look: dict[str, Style]) -> list[Panel]:
    """Quality against the length of the context, one panel per family of tasks with several lengths."""
    lengths = summary.lengths(rows)
    merged = []
    for length in lengths:
        exact = [r for r in rows if r["length"] == length]
        merged += summary.by_family(exact)
    found = []
    for family, measure, own in _measures(merged):
        if len({r["length"] for r in own}) < 2:
            continue

        def draw(ax: Axes, measure=measure, own=own) -> None:
            for method, style in look.items():
                if line := [r for r in own if r["method"] == method]:
                    _point(ax, line, "length", measure, style, line=True)
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks := sorted({r["length"] for r in own}), [f"{t:,}" for t in ticks])
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xlabel("tokens of context (logarithmic)")
            _finish(ax, measure)

        seen = "; ".join(f"{r['method']} at {r['length']:,}: {_value(r, measure)}" for r in own)
        found.append(Panel(family, f"{family}, {_label(measure)}, against tokens of context. {seen}", draw))
    return found


def turns(rows: Sequence[Row], look: dict[str, Style]) -> list[Panel]:
    """The first question beside the later ones, one panel per task of conversations; rows of one length."""
    found = []
    for task in summary.ordered(rows, "task"):
        own = [r for r in rows if r["task"] == task and r["later"] is not None and r["turns"]]

        def draw(ax: Axes, own=own) -> None:
            for i, r in enumerate(own):
                colour = look[r["method"]].colour
                for shift, name, alpha in ((-0.19, "first", 0.4), (0.19, "later", 1)):
                    ax.barh(i + shift, r[name], 0.36, color=colour, alpha=alpha)
                    ax.errorbar(r[name], i + shift, xerr=r[f"{name}_error"] or 0, color=INK, elinewidth=0.8)
            ax.set_yticks(range(len(own)), [wrapped(r["method"], 24) for r in own], fontsize=7.5)
            ax.set_ylim(len(own) - 0.4, -0.6)
            ax.set_xlim(0, 1.04)
            percents(ax.xaxis)
            ax.set_xlabel(f"{SCORE}; the first question pale")
            ax.grid(axis="x")
            ax.set_axisbelow(True)

        if own:
            seen = "; ".join(f"{r['method']}: {_value(r, 'first')}, then {_value(r, 'later')}" for r in own)
            size = (4.2, 0.8 + 0.36 * len(own))
            found.append(Panel(task, f"{task}, score of the first question and of the later ones. {seen}", draw, size))
    return found


def wrapped(method: str, width: int) -> str:
    """A method's string in lines of so many letters, broken after commas and spaces."""
    lines = [""]
    for part in re.findall(r"[^, ]+[, ]*", method):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def needles(records: Iterable[Record]) -> dict[str, list[Panel]]:
    """By task, one panel per method: score by depth and length, where needles were put at a few depths on purpose."""
    cells: dict[str, dict[str, dict[tuple[float, int], list[float]]]] = {}
    planned: set[str] = set()
    for r in summary.latest(records):
        length = summary.length_of(r)
        planned |= {r["task"]} if "depth" in r.get("about", {}) else set()
        for depth, score in zip(_depths(r), r["scores"], strict=False):
            if depth is not None and length:
                by_method = cells.setdefault(r["task"], {}).setdefault(r["method"], {})
                by_method.setdefault((depth, length), []).append(score)
    found = {}
    for task, methods in cells.items():
        every = {key for grid in methods.values() for key in grid}
        depths, lengths = sorted({depth for depth, _ in every}), sorted({length for _, length in every})
        # Depths by chance leave holes, or are more than these.
        if 1 < len(depths) <= MOST_DEPTHS and (task in planned or len(every) == len(depths) * len(lengths)):
            found[task] = [_heat(task, name, grid, depths, lengths) for name, grid in methods.items()]
    return found


def _depths(record: Record) -> list[float | None]:
    """Of each question's needle: as asked for, or found, to the nearest 5% (a needle has a length of its own)."""
    asked = record.get("about", {}).get("depth")
    if asked is not None:
        return [round(asked, 2)] * len(record["scores"])
    found = [a.get("depth") for a in record.get("asks", [])]
    return [None if d is None else round(round(d * 20) / 20, 2) for d in found]


def _heat(task: str, method: str, grid: dict, depths: list[float], lengths: list[int]) -> Panel:
    values = np.array([[np.mean(grid[d, n]) if (d, n) in grid else np.nan for n in lengths] for d in depths])

    def draw(ax: Axes) -> None:
        edges = np.arange(len(lengths) + 1) - 0.5, np.arange(len(depths) + 1) - 0.5
        ax.pcolormesh(*edges, np.ma.masked_invalid(values), cmap=MAP, vmin=0, vmax=1, linewidth=0)
        centred = {"ha": "center", "va": "center", "fontsize": 8}
        if values.size <= MOST_NUMBERS:
            for (i, j), x in np.ndenumerate(values):
                colour = INK if np.isnan(x) else "#ffffff" if x < 0.55 else "#101010"
                ax.text(j, i, "–" if np.isnan(x) else f"{100 * x:.0f}", color=colour, **centred)
        every = -(-len(lengths) // 4)
        ax.set_xticks(range(0, len(lengths), every), [f"{n:,}" for n in lengths[::every]])
        ax.set_yticks(range(len(depths)), [f"{100 * d:.0f}" for d in depths])
        ax.invert_yaxis()
        ax.set(xlabel="tokens of context", ylabel="depth, %")
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)

    low = np.nanmin(values)
    at = [f"{lengths[j]:,} tokens, depth {depths[i]:.0%}" for i, j in zip(*np.where(values == low), strict=True)]
    alt = f"{task} under {method}: score {100 * np.nanmean(values):.0f} on average, least {100 * low:.0f} at {at[0]}"
    return Panel(method, alt, draw, (1.9, 0.6 + 0.25 * len(depths)))
