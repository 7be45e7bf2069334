"""Charts of a run, drawn by Altair: functions from its rows (`summary.rows`) or its records to a chart.

A chart shows its numbers where one points at it. It is a picture in a notebook, a file by `save`, a part of the page.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from kvjax.eval.page import summary
from kvjax.eval.page.summary import Record, Row
from kvjax.utils.packages import import_optional

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe & Ito's that show on any background
SHAPES = ("square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right", "triangle-left")
EXACT_COLOR = "#808080"
MEASURE_TITLES = {
    "score": "score, 0 to 100",
    "bits": "bits per byte (less is better)",
    "bits_above_full": "bits per byte above full (less is better)",
}
BYTES_TITLE = ["bytes on the device, % of the exact cache's,", "both in bfloat16 (logarithmic)"]
TOOLTIP = [
    alt.Tooltip(f"{field}:N", title=title)
    for field, title in {"method": "method", "words": "value", "bytes": "% of full", "length": "tokens"}.items()
]
LEGEND = alt.Legend(orient="bottom", columns=3, title=None, labelLimit=0, symbolLimit=0, symbolOpacity=1)
MOST_DEPTHS = 12  # of a map of needles


@dataclasses.dataclass(frozen=True)
class Picture:
    """A chart of a run.

    Attributes:
      kind: "tradeoff", "turns", "length", "needle" or "methods".
      name: the chart's name among those of a run, and that of its file.
      length: tokens of the contexts, where all have one length.
      chart: Altair's chart.
    """

    kind: str
    name: str
    length: int | None
    chart: alt.TopLevelMixin

    def save(self, path: Path | str) -> Path:
        """Writes the chart, in the format of the path's ending (png, svg, pdf, html or json); returns the path."""
        if Path(path).suffix.lower() not in (".html", ".json"):
            import_optional("vl_convert", "pictures need")
        self.chart.save(str(path), scale_factor=2)
        return Path(path)

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.chart.save(out, format="png", scale_factor=1.5)
        return out.getvalue()


def pictures(rows: Sequence[Row], records: Iterable[Record]) -> list[Picture]:
    """Returns all charts that a run has data for."""
    methods = summary.distinct_values(rows, "method")
    drawn: list[tuple[str, str, int | None, alt.TopLevelMixin | None]] = []  # the fields of pictures
    for length in summary.lengths(rows) or [None]:
        chosen, end = summary.at_length(rows, length), "" if length is None else f"-{length}"
        drawn.append(("tradeoff", f"tradeoff{end}", length, draw_tradeoff(chosen, methods)))
        drawn.append(("turns", f"turns{end}", length, draw_turns(chosen, methods)))
    drawn.append(("length", "length", None, draw_lengths(rows, methods)))
    drawn += [("needle", f"needle-{task}", None, chart) for task, chart in draw_needles(records).items()]
    return [Picture(kind, name, length, chart) for kind, name, length, chart in drawn if chart is not None]


def write(pictures: Iterable[Picture], directory: Path) -> list[Path]:
    """Writes plots/NAME.png into the directory; returns the paths."""
    folder = Path(directory) / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    return [p.save(folder / f"{re.sub('[^A-Za-z0-9._-]', '_', p.name)}.png") for p in pictures]


def draw_tradeoff(rows: Sequence[Row], methods: Sequence[str]) -> alt.TopLevelMixin | None:
    """Draws quality against bytes on the device, a panel per family of tasks, with the methods of the front named.

    Args:
      rows: of contexts of one length.
      methods: all methods of the run; their order gives colors and shapes.
    """
    x = alt.X("bytes:Q", scale=alt.Scale(type="log", nice=False, padding=16), title=BYTES_TITLE)
    x = x.axis(format=",~g", labelOverlap="greedy", grid=False)
    panels = []
    for family, measure, own in _split_by_measure([r for r in summary.by_family(rows) if r["device_percent"]]):
        front = alt.Chart(_values(find_front(own, measure), measure)).encode(x, _y(measure))
        line = front.mark_line(interpolate="step-after", color=EXACT_COLOR, opacity=0.6, strokeWidth=1)
        names = front.mark_text(align="left", dx=7, dy=-7, fontSize=10, color=EXACT_COLOR).encode(text="method:N")
        base = alt.Chart(_values(own, measure)).encode(x)
        panel = alt.layer(line, *_draw_values(base, measure, methods), names)
        panels.append(panel.properties(title=family, width=330, height=230))
    return _side_by_side(panels)


def draw_methods(rows: Sequence[Row], methods: Sequence[str], chosen: str) -> alt.TopLevelMixin | None:
    """Draws the quality of methods of equal bytes, one a line and `chosen` in color, a panel per task."""
    y = alt.Y("method:N", sort=list(methods), title=None).axis(labelLimit=0, grid=True)
    color = alt.condition(alt.datum.method == chosen, alt.value(COLORS[0]), alt.value(EXACT_COLOR))
    panels = []
    for task, measure, own in _split_by_measure(rows):
        base = alt.Chart(_values(own, measure)).encode(y, color=color)
        scale = alt.Scale(zero=False, nice=False, padding=12)
        intervals = base.mark_rule(opacity=0.5).encode(alt.X("low:Q", scale=scale), alt.X2("high"))
        points = base.mark_point(filled=True, size=60, opacity=1)
        x = alt.X("value:Q", scale=scale, title=MEASURE_TITLES[measure]).axis(tickCount=6)
        points = points.encode(x, tooltip=TOOLTIP)
        panels.append((intervals + points).properties(title=task, width=330, height=alt.Step(20)))
    return _side_by_side(panels)


def draw_lengths(rows: Sequence[Row], methods: Sequence[str]) -> alt.TopLevelMixin | None:
    """Draws quality against the length of the context, a panel per family of tasks with several lengths."""
    merged = [r for n in summary.lengths(rows) for r in summary.by_family([r for r in rows if r["length"] == n])]
    panels = []
    for family, measure, own in _split_by_measure(merged):
        if len(ticks := summary.lengths(own)) > 1:
            x = alt.X(
                "length:Q", scale=alt.Scale(type="log", base=2, padding=16), title="tokens of context (logarithmic)"
            )
            x = x.axis(values=ticks, format=",d", grid=False)
            base = alt.Chart(_values(own, measure)).encode(x)
            line = base.mark_line(strokeWidth=1, opacity=0.7).encode(_y(measure), color_of(methods))
            panel = alt.layer(line, *_draw_values(base, measure, methods))
            panels.append(panel.properties(title=family, width=330, height=230))
    return _side_by_side(panels)


def draw_turns(rows: Sequence[Row], methods: Sequence[str]) -> alt.TopLevelMixin | None:
    """Draws scores of the first question (pale) and of the later ones, a panel per task of conversations."""
    panels = []
    for task in summary.distinct_values(rows, "task"):
        own = [r for r in rows if r["task"] == task and r["later"] is not None and r["turns"]]
        if own:
            halves = [{"question": name} | v for name in ("first", "later") for v in _values(own, name).values]
            base = alt.Chart(alt.Data(values=halves)).encode(
                y=alt.Y("method:N", sort=list(methods), title=None).axis(labelLimit=220), yOffset="question:N"
            )
            x = alt.X("value:Q", scale=alt.Scale(domain=[0, 100]), title="score, 0 to 100; the first question pale")
            pale = alt.Opacity("question:N", scale=alt.Scale(domain=["first", "later"], range=[0.4, 1]), legend=None)
            color = color_of(methods).legend(None)
            bars = base.mark_bar().encode(x, color, pale, tooltip=["question:N", *TOOLTIP])
            intervals = base.mark_rule(color=EXACT_COLOR).encode(x="low:Q", x2="high:Q")
            panels.append((bars + intervals).properties(title=task, width=330, height=alt.Step(11)))
    return _side_by_side(panels)


def draw_needles(records: Iterable[Record]) -> dict[str, alt.TopLevelMixin]:
    """Draws maps of scores by depth and length, a panel per method, for each task whose needles have a few depths."""
    cells: dict[str, dict[tuple[str, float, int], list[float]]] = {}
    tasks_with_depths: set[str] = set()
    for r in summary.latest(records):
        length, depth_of_all = summary.length_of(r), r.get("about", {}).get("depth")
        if depth_of_all is not None:
            tasks_with_depths.add(r["task"])
            depths = [depth_of_all] * len(r["scores"])
        else:
            # To the nearest 5% where no depth was set: a needle has a length itself.
            depths = [None if (d := a.get("depth")) is None else round(d * 20) / 20 for a in r.get("asks", [])]
        for depth, score in zip(depths, r["scores"], strict=False):
            if depth is not None and length:
                by_place = cells.setdefault(r["task"], {})
                by_place.setdefault((r["method"], round(depth, 2), length), []).append(score)
    charts = {}
    for task, by_place in cells.items():
        methods = list(dict.fromkeys(method for method, _, _ in by_place))
        depths, lengths = ({place[i] for place in by_place} for i in (1, 2))
        is_whole_grid = len({place[1:] for place in by_place}) == len(depths) * len(lengths)
        # Random depths leave holes, or are too many for a map.
        if not 1 < len(depths) <= MOST_DEPTHS or not (task in tasks_with_depths or is_whole_grid):
            continue
        values = [
            {"method": method, "depth": round(100 * depth), "length": length, "score": 100 * float(np.mean(scores))}
            for (method, depth, length), scores in by_place.items()
        ]
        base = alt.Chart(alt.Data(values=values)).encode(
            x=alt.X("length:O", title="tokens of context").axis(format=",d", labelAngle=0),
            y=alt.Y("depth:O", title="depth, %"),
            tooltip=["method:N", "length:O", "depth:O", alt.Tooltip("score:Q", format=".1f")],
        )
        color = alt.Color("score:Q", scale=alt.Scale(domain=[0, 100], range=["#0b2545", "#3b6ea5", "#dceaf7"]))
        dark = alt.condition("datum.score < 55", alt.value("white"), alt.value("#101010"))
        numbers = base.mark_text(fontSize=10).encode(alt.Text("score:Q", format=".0f"), color=dark)
        each = (base.mark_rect().encode(color) + numbers).properties(width=44 * len(lengths), height=alt.Step(20))
        charts[task] = each.facet(alt.Facet("method:N", sort=methods, title=task), columns=4)
    return charts


def find_front(rows: Sequence[Row], measure: str) -> list[Row]:
    """Returns the rows that no other beats in both quality and bytes on the device, the fewest bytes first."""
    sign, front = 1 if measure == "score" else -1, []
    for r in sorted(rows, key=lambda r: (r["device_percent"], -sign * r[measure])):
        if not front or sign * r[measure] > sign * front[-1][measure]:
            front.append(r)
    return front


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


def _values(rows: Sequence[Row], measure: str) -> alt.Data:
    """What a chart draws of each row: method, bytes, length, and the measure's value with its interval."""
    percent = 1 if measure.startswith("bits") else 100
    values: list[dict[str, Any]] = []
    for r in rows:
        low, high = summary.interval_of(r, measure) or (r[measure], r[measure])
        numbers = {"value": percent * r[measure], "low": percent * low, "high": percent * high}
        words = f"{summary.format_value(r[measure], measure)} {summary.format_interval(r, measure)}".rstrip()
        values.append(
            {"method": r["method"], "bytes": r["device_percent"], "length": r["length"], "words": words} | numbers
        )
    return alt.Data(values=values)


def color_of(methods: Sequence[str]) -> alt.Color:
    """One color per method in all charts, and grey for the exact one; `shape_of` tells those of one color apart."""
    others = [m for m in methods if m != summary.REFERENCE]
    colors = {m: COLORS[i % len(COLORS)] for i, m in enumerate(others)} | {summary.REFERENCE: EXACT_COLOR}
    scale = alt.Scale(domain=list(methods), range=[colors[m] for m in methods])
    return alt.Color("method:N", scale=scale, legend=LEGEND)


def shape_of(methods: Sequence[str]) -> alt.Shape:
    """One shape per method; 6 colors and 7 shapes are 42 methods without repetition."""
    others = [m for m in methods if m != summary.REFERENCE]
    shapes = {m: SHAPES[i % len(SHAPES)] for i, m in enumerate(others)} | {summary.REFERENCE: "circle"}
    scale = alt.Scale(domain=list(methods), range=[shapes[m] for m in methods])
    return alt.Shape("method:N", scale=scale, legend=LEGEND)


def _y(measure: str, field: str = "value") -> alt.Y:
    return alt.Y(f"{field}:Q", scale=alt.Scale(zero=False, nice=False, padding=12), title=MEASURE_TITLES[measure])


def _draw_values(base: alt.Chart, measure: str, methods: Sequence[str]) -> tuple[alt.Chart, alt.Chart]:
    """Draws the 95% intervals, and the values over them."""
    bars = base.mark_rule(opacity=0.5).encode(_y(measure, "low"), alt.Y2("high"), color_of(methods))
    points = base.mark_point(filled=True, size=60, opacity=1)
    return bars, points.encode(_y(measure), color_of(methods), shape_of(methods), tooltip=TOOLTIP)


def _side_by_side(panels: Sequence[alt.LayerChart]) -> alt.TopLevelMixin | None:
    if not panels:
        return None
    return alt.concat(*panels, columns=2).resolve_scale(color="shared", shape="shared")
