"""The plots of a run, as SVG for the page and as PNG files: a method has one color and marker in all of them."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle

from kvjax.eval.page import charts, summary
from kvjax.eval.page.charts import INK, Panel, Style, assign_styles
from kvjax.eval.page.summary import Record, Row

COLOR_SCALE = tuple(to_hex(charts.MAP(x)) for x in np.linspace(0, 1, 9))
RC: dict[Any, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "kvjax", "font.size": 9, "axes.labelsize": 9, "axes.titlesize": 9},
    **{"text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "grid.color": "#88888855"},
    **{"grid.linewidth": 0.5, "xtick.labelsize": 8, "ytick.labelsize": 8, "errorbar.capsize": 0},
}


@dataclasses.dataclass(frozen=True)
class Plot:
    """Panels that belong together. kind: "tradeoff", "length", "needle" or "turns"; length: of the contexts."""

    kind: str
    name: str
    panels: tuple[Panel, ...]
    length: int | None = None
    styles: dict[str, Style] | None = None  # for a legend


def plots(rows: Sequence[Row], records: Iterable[Record]) -> list[Plot]:
    """Returns all plots that the run has data for."""
    styles = assign_styles(summary.distinct_values(rows, "method"))
    found = []
    for length in summary.lengths(rows) or [None]:
        chosen = summary.at_length(rows, length)
        end = "" if length is None else f"-{length}"
        found.append(Plot("tradeoff", f"tradeoff{end}", tuple(charts.tradeoff_panels(chosen, styles)), length, styles))
        found.append(Plot("turns", f"turns{end}", tuple(charts.turn_panels(chosen, styles)), length))
    found.append(Plot("length", "length", tuple(charts.length_panels(rows, styles)), styles=styles))
    found += [Plot("needle", f"needle-{task}", tuple(p)) for task, p in charts.needle_panels(records).items()]
    return [p for p in found if p.panels]


def write(plots: Iterable[Plot], directory: Path) -> list[Path]:
    """Writes plots/NAME.png into the directory; returns the paths."""
    folder = Path(directory) / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in plots:
        paths.append(folder / f"{re.sub('[^A-Za-z0-9._-]', '_', plot.name)}.png")
        with matplotlib.rc_context(RC):
            figure(plot).savefig(paths[-1], dpi=150)
    return paths


def svgs(plot: Plot) -> list[str]:
    """Returns one SVG element per panel, without a heading; the color INK becomes that of the text around it."""
    return [_svg(panel, f"{plot.name}-{i}") for i, panel in enumerate(plot.panels)]


def marker_svg(style: Style) -> str:
    """Returns a method's marker as a small SVG element, for a legend in HTML."""
    marker = MarkerStyle(style.marker)
    shapes = [np.asarray(x) for x in marker.get_path().transformed(marker.get_transform()).to_polygons()]
    points = np.concatenate(shapes)
    lines = "".join("M" + "L".join(f"{x:.2f} {-y:.2f}" for x, y in s) + "Z" for s in shapes)
    reach = max(float(np.abs(points).max()), 1e-6)
    color = "currentColor" if style.color == INK else style.color
    box = f"{-reach:.2f} {-reach:.2f} {2 * reach:.2f} {2 * reach:.2f}"
    return f'<svg class="glyph" viewBox="{box}" aria-hidden="true"><path fill="{color}" d="{lines}"/></svg>'


def _svg(panel: Panel, name: str) -> str:
    with matplotlib.rc_context(RC):
        fig = Figure(figsize=panel.size, layout="constrained")
        panel.draw(fig.subplots())
        out = io.StringIO()
        fig.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    for pattern in (r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<!--.*?-->"):
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    name = re.sub(r"\W", "-", name)
    text = re.sub(r'\bid="', f'id="{name}-', text)  # ids of several plots share one page
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text).replace(INK, "currentColor")
    # Points carry the words of their tooltips in their ids.
    text = re.sub(
        rf'<g id="{name}-point-([0-9a-f]+)">',
        lambda m: f"{m[0]}<title>{escape(bytes.fromhex(m[1]).decode())}</title>",
        text,
    )
    head = f'<svg class="plot" role="img" aria-labelledby="{name}-title {name}-words" viewBox='
    text = re.sub(r"<svg [^>]*?viewBox=", head, text, count=1, flags=re.DOTALL)
    text = re.sub(r'^(<svg [^>]*?viewBox="[^"]*")[^>]*>', r'\1 xmlns="http://www.w3.org/2000/svg">', text)
    text = text.replace("xlink:href", "href")
    words = f'<title id="{name}-title">{escape(panel.title)}</title><desc id="{name}-words">{escape(panel.alt)}</desc>'
    return text.replace(">", ">" + words, 1).strip()


class _Picture(Figure):
    """A figure that a notebook shows, whether or not pyplot was imported there."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=100)
        return out.getvalue()


def figure(plot: Plot) -> Figure:
    """Draws all panels of a plot in one figure, with a legend below."""
    columns = min(len(plot.panels), 4 if plot.kind == "needle" else 3)
    lines = -(-len(plot.panels) // columns)
    width, height = (max(p.size[i] for p in plot.panels) for i in (0, 1))
    size = (max(width * columns, 4.2), (height + 0.3) * lines)
    legend_columns = max(1, int(size[0] // 3.2))
    with matplotlib.rc_context(RC):
        under = 0.2 * -(-len(plot.styles) // legend_columns) + 0.4 if plot.styles else 0
        fig = _Picture(figsize=(size[0], size[1] + under), layout="constrained", facecolor="white")
        axes = fig.subplots(lines, columns, squeeze=False).flat
        for ax, panel in zip(axes, plot.panels, strict=False):
            panel.draw(ax)
            ax.set_title(charts.wrap_method(panel.title, int(width * 11)), fontsize=9)
        for ax in axes[len(plot.panels) :]:
            ax.set_visible(False)
        if plot.styles:
            marks = [Line2D([], [], color=s.color, marker=s.marker, linestyle="") for s in plot.styles.values()]
            legend = {"loc": "outside lower center", "ncols": legend_columns, "frameon": False, "fontsize": 8}
            title = "bars: 95% intervals over contexts"
            fig.legend(marks, list(plot.styles), title=title, title_fontsize=8, **legend)
        if plot.kind == "needle":
            scale = ScalarMappable(cmap=charts.MAP)
            fig.colorbar(scale, ax=fig.axes, format=charts.PERCENT, shrink=0.8, label=charts.SCORE_LABEL)
        fig.draw_without_rendering()  # now, while these settings are in force
    return fig
