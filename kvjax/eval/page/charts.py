"""Charts of a run: pairs of axes, each with a description in words; `plots` writes them to files and pages."""

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

INK = "#1a1c1f"  # becomes the color of the page's text
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe & Ito's that show on any background
MARKERS = ("s", "^", "D", "v", "P", "X", "<")  # 6 colors x 7 markers: 42 methods without repetition
MAP = LinearSegmentedColormap.from_list("needles", ["#0b2545", "#3b6ea5", "#dceaf7"])  # one hue, by lightness
PERCENT = FuncFormatter(lambda x, _: f"{100 * x:.0f}")
SCORE_LABEL = "score, 0 to 100"
MEASURE_LABELS = {
    "score": SCORE_LABEL,
    "bits": "bits per byte (less is better)",
    "bits_above_full": "bits per byte above full (less is better)",
}
BYTES_LABEL = "bytes on the device, % of the exact cache's, both in bfloat16"
MOST_MAP_DEPTHS, MOST_CELLS_WITH_NUMBERS = 12, 40


@dataclasses.dataclass(frozen=True)
class Style:
    """The color and marker of a method in all charts."""

    color: str
    marker: str


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes: `alt` describes it in words; draw(axes) draws it; size in inches."""

    title: str
    alt: str
    draw: Callable[[Axes], None]
    size: tuple[float, float] = (4.2, 3.2)


def assign_styles(methods: Sequence[str]) -> dict[str, Style]:
    """Returns a color and marker for each method, in this order; the exact one is drawn in ink."""
    others = [m for m in methods if m != summary.REFERENCE]
    styles = {m: Style(COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i, m in enumerate(others)}
    return {m: styles.get(m, Style(INK, "o")) for m in methods}


def tradeoff_panels(rows: Sequence[Row], styles: dict[str, Style]) -> list[Panel]:
    """Draws quality against bytes on the device, one panel per family of tasks, for rows of one length."""
    panels = []
    for family, measure, own in _split_by_measure([r for r in summary.by_family(rows) if r["device_percent"]]):

        def draw(ax: Axes, measure=measure, own=own) -> None:
            # The frontier: steps between the methods that no other beats in both quality and bytes.
            sign = 1 if measure == "score" else -1
            best: list[Row] = []
            for r in sorted(own, key=lambda r: (r["device_percent"], -sign * r[measure])):
                if not best or sign * r[measure] > sign * best[-1][measure]:
                    best.append(r)
            x, y = [r["device_percent"] for r in best], [r[measure] for r in best]
            ax.step(x, y, where="post", color=INK, alpha=0.3, linewidth=1, zorder=1)
            for r in own:
                _draw_points(ax, [r], "device_percent", measure, styles[r["method"]])
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xlabel(wrap_method(f"{BYTES_LABEL} (logarithmic)", 48))
            _finish(ax, measure)
            most = max(100, *(r["device_percent"] for r in own))
            ax.spines["bottom"].set_bounds(ax.get_xlim()[0], most)

        values = "; ".join(f"{r['method']}: {_format_value(r, measure)} at {r['device_percent']:.1f}%" for r in own)
        alt = f"{family}, {MEASURE_LABELS[measure]}, against {BYTES_LABEL}. {values}"
        panels.append(Panel(family, alt, draw))
    return panels


def length_panels(rows: Sequence[Row], styles: dict[str, Style]) -> list[Panel]:
    """Draws quality against the length of the context, one panel per family of tasks with several lengths."""
    merged = []
    for length in summary.lengths(rows):
        merged += summary.by_family([r for r in rows if r["length"] == length])
    panels = []
    for family, measure, own in _split_by_measure(merged):
        if len({r["length"] for r in own}) < 2:
            continue

        def draw(ax: Axes, measure=measure, own=own) -> None:
            for method, style in styles.items():
                if line := [r for r in own if r["method"] == method]:
                    _draw_points(ax, line, "length", measure, style)
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks := sorted({r["length"] for r in own}), [f"{t:,}" for t in ticks])
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xlabel("tokens of context (logarithmic)")
            _finish(ax, measure)

        values = "; ".join(f"{r['method']} at {r['length']:,}: {_format_value(r, measure)}" for r in own)
        alt = f"{family}, {MEASURE_LABELS[measure]}, against tokens of context. {values}"
        panels.append(Panel(family, alt, draw))
    return panels


def turn_panels(rows: Sequence[Row], styles: dict[str, Style]) -> list[Panel]:
    """Draws the first question and the later ones, one panel per task of conversations, for rows of one length."""
    panels = []
    for task in summary.distinct_values(rows, "task"):
        own = [r for r in rows if r["task"] == task and r["later"] is not None and r["turns"]]

        def draw(ax: Axes, own=own) -> None:
            for i, r in enumerate(own):
                color = styles[r["method"]].color
                for shift, name, alpha in ((-0.19, "first", 0.4), (0.19, "later", 1)):
                    ax.barh(i + shift, r[name], 0.36, color=color, alpha=alpha)
                    ax.errorbar(r[name], i + shift, xerr=_error_bars([r], name), color=INK, elinewidth=0.8)
            ax.set_yticks(range(len(own)), [wrap_method(r["method"], 24) for r in own], fontsize=7.5)
            ax.set_ylim(len(own) - 0.4, -0.6)
            ax.set_xlim(0, 1.04)
            set_percent_axis(ax.xaxis)
            ax.set_xlabel(f"{SCORE_LABEL}; the first question pale")
            ax.grid(axis="x")
            ax.set_axisbelow(True)

        if own:
            values = (f"{r['method']}: {_format_value(r, 'first')}, then {_format_value(r, 'later')}" for r in own)
            alt = f"{task}, score of the first question and of the later ones. {'; '.join(values)}"
            panels.append(Panel(task, alt, draw, (4.2, 0.8 + 0.36 * len(own))))
    return panels


def needle_panels(records: Iterable[Record]) -> dict[str, list[Panel]]:
    """Draws heat maps of scores by depth and length: by task, one panel per method.

    A task has a map if its needles were put at a few depths on purpose.
    """
    cells: dict[str, dict[str, dict[tuple[float, int], list[float]]]] = {}
    tasks_with_depths: set[str] = set()
    for r in summary.latest(records):
        length, depth_of_all = summary.length_of(r), r.get("about", {}).get("depth")
        if depth_of_all is not None:
            tasks_with_depths.add(r["task"])
            case_depths = [depth_of_all] * len(r["scores"])
        else:
            # To the nearest 5% where no depth was set: a needle has a length itself.
            case_depths = [None if (d := a.get("depth")) is None else round(d * 20) / 20 for a in r.get("asks", [])]
        for depth, score in zip(case_depths, r["scores"], strict=False):
            if depth is not None and length:
                by_method = cells.setdefault(r["task"], {}).setdefault(r["method"], {})
                by_method.setdefault((round(depth, 2), length), []).append(score)
    panels = {}
    for task, methods in cells.items():
        keys = {key for grid in methods.values() for key in grid}
        depths, lengths = sorted({depth for depth, _ in keys}), sorted({length for _, length in keys})
        is_whole_grid = task in tasks_with_depths or len(keys) == len(depths) * len(lengths)
        # Random depths leave holes, or are too many for a map.
        if 1 < len(depths) <= MOST_MAP_DEPTHS and is_whole_grid:
            panels[task] = [_heat_map(task, name, grid, depths, lengths) for name, grid in methods.items()]
    return panels


def _heat_map(task: str, method: str, grid: dict, depths: list[float], lengths: list[int]) -> Panel:
    values = np.array([[np.mean(grid[d, n]) if (d, n) in grid else np.nan for n in lengths] for d in depths])

    def draw(ax: Axes) -> None:
        edges = np.arange(len(lengths) + 1) - 0.5, np.arange(len(depths) + 1) - 0.5
        ax.pcolormesh(*edges, np.ma.masked_invalid(values), cmap=MAP, vmin=0, vmax=1, linewidth=0)
        if values.size <= MOST_CELLS_WITH_NUMBERS:
            for (i, j), x in np.ndenumerate(values):
                color = INK if np.isnan(x) else "#ffffff" if x < 0.55 else "#101010"
                number = "–" if np.isnan(x) else f"{100 * x:.0f}"
                ax.text(j, i, number, color=color, ha="center", va="center", fontsize=8)
        every = -(-len(lengths) // 4)  # at most four labels fit below a map
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


def _split_by_measure(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """(family, measure, its rows), without empty ones; the measure of text is its loss against `full` where known.

    Texts differ far more than methods do on one text: only differences on the same texts have small intervals.
    """
    parts = []
    for family in summary.distinct_values(rows, "task"):
        own = [r for r in rows if r["task"] == family]
        if scored := [r for r in own if r["score"] is not None]:
            parts.append((family, "score", scored))
        if texts := [r for r in own if r["bits"] is not None]:
            is_paired = all(r["bits_above_full"] is not None for r in texts)
            parts.append((family, "bits_above_full" if is_paired else "bits", texts))
    return parts


def _format_value(row: Row, measure: str) -> str:
    return f"{summary.format_value(row[measure], measure)} {summary.format_interval(row, measure)}".rstrip()


def _error_bars(rows: Sequence[Row], measure: str) -> np.ndarray:
    """How far the 95% intervals reach below and above, [2 n]; 0 where there is none."""
    ends = [summary.interval_of(r, measure) or (r[measure], r[measure]) for r in rows]
    return np.array([(r[measure] - low, high - r[measure]) for r, (low, high) in zip(rows, ends, strict=True)]).T


def _draw_points(ax: Axes, rows: Sequence[Row], x: str, measure: str, style: Style) -> None:
    """Draws one method's points against the field `x`; several are joined by a line."""
    at, y = [r[x] for r in rows], [r[measure] for r in rows]
    ax.errorbar(at, y, _error_bars(rows, measure), fmt="none", ecolor=style.color, elinewidth=1, alpha=0.6, zorder=2)
    # Lengths of one method are a series; methods at one length are not.
    if x == "length":
        ax.plot(at, y, color=style.color, linewidth=1, alpha=0.7, zorder=2)
    for i, r in enumerate(rows):
        (mark,) = ax.plot(at[i], y[i], style.marker, color=style.color, markersize=6.5, markeredgewidth=0, zorder=3)
        where = f"{r['device_percent']:.1f}% of full" if x == "device_percent" else f"{r['length']:,} tokens"
        words = f"{r['method']}: {_format_value(r, measure)}, {where}"
        # An SVG id carries the words of a tooltip through matplotlib.
        mark.set_gid(f"point-{words.encode().hex()}")


def _finish(ax: Axes, measure: str) -> None:
    ax.set_ylabel(MEASURE_LABELS[measure])
    ax.grid(axis="y")
    ax.margins(0.08)
    if measure == "score":
        set_percent_axis(ax.yaxis)


def set_percent_axis(axis: Axis, whole: float = 1.0) -> None:
    """Makes an axis of percents: ticks at round numbers from 0 to 100, where its line ends.

    There is room beyond, as markers at 0 and 100 would be cut in half. Call it when everything is drawn.

    Args:
      axis: `ax.xaxis` or `ax.yaxis`.
      whole: the drawn number that is 100%.
    """
    low, high = sorted(axis.get_view_interval())
    low, high = max(low, -0.04 * whole), min(high, 1.04 * whole)
    inside = max(low, 0.0), min(high, whole)
    ticks = MaxNLocator(8, steps=(1, 2, 5, 10)).tick_values(*(100 * x / whole for x in inside))
    # A limit may lie half a thousandth of a point away from a tick.
    ticks = [round(t, 6) for t in ticks if 100 * inside[0] / whole - 5e-4 <= t <= 100 * inside[1] / whole + 5e-4]
    axis.set_ticks([t * whole / 100 for t in ticks], [f"{t:g}" for t in ticks])
    ax, is_x = axis.axes, isinstance(axis, XAxis)
    (ax.set_xlim if is_x else ax.set_ylim)(low, high)
    if not ax.spines["right" if is_x else "top"].get_visible():  # a frame on all sides is not opened
        ax.spines["bottom" if is_x else "left"].set_bounds(*inside)


def wrap_method(method: str, width: int) -> str:
    """Breaks a method's string after commas and spaces into lines of up to `width` letters."""
    lines = [""]
    for part in re.findall(r"[^, ]+[, ]*", method):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)
