"""Plots: one style per method, SVG that can share a page, words for each, PNG files."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.figure import Figure

from kvjax.eval.page import charts, plots, summary
from tests.eval import fake_run
from tests.eval.page.axes import check_percents, check_scales, ticks


@pytest.fixture(scope="module")
def made_plots():
    """Plots of few methods and lengths, because drawing takes time."""
    run = {"methods": ["full", "kivi:bits=1", "snapkv:budget=256 + kvcrush"], "lengths": [512, 1024], "cases": 10}
    records = list(fake_run.records(tasks=["niah", "ruler.vt", "turns.recall", "ppl"], **run))
    return plots.plots(summary.rows(records), records)


def test_every_kind_is_there(made_plots):
    names = {p.name: len(p.panels) for p in made_plots}
    assert names == {
        "tradeoff-512": 4,
        "turns-512": 1,
        "tradeoff-1024": 4,
        "turns-1024": 1,
        "length": 4,
        "needle-niah": 3,
    }


def test_svg_is_well_formed_and_its_ids_are_its_own(made_plots):
    earlier_ids: set[str] = set()
    for plot in made_plots[:2] + made_plots[-1:]:
        for text in plots.svgs(plot):
            root = ElementTree.fromstring(text)
            ids = {e.attrib["id"] for e in root.iter() if "id" in e.attrib}
            assert not ids & earlier_ids
            earlier_ids |= ids
            assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= ids
            assert set(root.attrib["aria-labelledby"].split()) <= ids
            assert "currentColor" in text and charts.INK not in text
            assert not re.search(r"<(style|metadata|image|script)", text)


def test_words_and_tooltips_carry_the_numbers(made_plots):
    (text, *_) = plots.svgs(made_plots[0])
    assert "kivi:bits=1: " in made_plots[0].panels[0].alt and "% of the exact cache's" in made_plots[0].panels[0].alt
    assert re.search(r"<title>snapkv:budget=256 \+ kvcrush: [\d.]+ \(\d+–\d+\), 27.4% of full</title>", text)


def test_styles_are_distinct_and_full_is_ink():
    styles = charts.assign_styles(["full", *(f"m{i}" for i in range(42))])
    assert len(set(styles.values())) == 43 and styles["full"].color == charts.INK


def test_depth_as_asked_for_or_to_the_nearest_twentieth():
    task = {"task": "niah", "method": "full", "scores": [1.0]}
    exact_depth = {"key": "a", "about": {"length": 512, "depth": 1 / 3}, "asks": [{"depth": 0.3}]}
    odd_depth = {"key": "b", "about": {"length": 512}, "asks": [{"depth": 0.741}]}
    (panel,) = charts.needle_panels([task | exact_depth, task | odd_depth | {"scores": [0.0]}])["niah"]
    assert "least 0 at 512 tokens, depth 75%" in panel.alt
    assert charts.needle_panels([task | exact_depth]) == {}  # one depth is no map
    by_chance = [task | {"key": str(n), "about": {"length": n}, "asks": [{"depth": n / 4096}]} for n in (512, 1024)]
    assert charts.needle_panels(by_chance) == {}


def test_long_names_break_after_commas_and_spaces():
    assert charts.wrap_method("kcache:n=64,device_layers=1", 24) == "kcache:n=64,\ndevice_layers=1"
    assert charts.wrap_method("snapkv:budget=256 + kvcrush", 24) == "snapkv:budget=256 +\nkvcrush"


def is_score(panel: charts.Panel) -> bool:
    return "score" in panel.alt and "depth" not in panel.alt


def draw_axes(panel: charts.Panel):
    with matplotlib.rc_context(plots.RC):
        ax = Figure(layout="constrained").subplots()
        panel.draw(ax)
    return ax


def test_axes_of_percents_end_at_100_and_logarithmic_ones_say_so(made_plots):
    for plot in made_plots:
        for panel in plot.panels:
            ax = draw_axes(panel)
            check_scales(ax)
            assert ax.get_xlabel() and (ax.get_ylabel() or plot.kind == "turns")
            if is_score(panel):
                check_percents(ax.xaxis if plot.kind == "turns" else ax.yaxis)
            if plot.kind == "needle":
                assert (ax.get_xlabel(), ax.get_ylabel()) == ("tokens of context", "depth, %")
                assert [text for _, text in ticks(ax.yaxis)] == ["0", "25", "50", "75", "100"]


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.91, 1.0, ["92", "94", "96", "98", "100"]),
        (0.82, 0.98, ["85", "90", "95"]),
        (0.0, 1.0, ["0", "20", "40", "60", "80", "100"]),
        (0.991, 0.998, ["99.1", "99.2", "99.3", "99.4", "99.5", "99.6", "99.7", "99.8"]),
        (0.4, 0.4, None),
        (1.0, 1.0, None),
        (0.0, 0.0, None),
    ],
)
@pytest.mark.parametrize("whole", [1.0, 100.0])
@pytest.mark.parametrize("name", ["x", "y"])
def test_ticks_of_percents_are_round(low, high, said, whole, name):
    ax = Figure(layout="constrained").subplots()
    ax.spines[["top", "right"]].set_visible(False)
    axis = ax.xaxis if name == "x" else ax.yaxis
    values = [low * whole, high * whole]
    ax.plot(*((values, [0, 1]) if name == "x" else ([0, 1], values)), "o")
    charts.set_percent_axis(axis, whole)
    check_percents(axis, whole)
    first, last = axis.get_view_interval()
    assert first <= values[0] and values[1] <= last  # no marker lies outside
    if said:
        assert [text for _, text in ticks(axis)] == said
    if high == 1 and low < 1:  # there is room for the upper half of a marker
        assert last > whole


def test_png_files(made_plots, tmp_path):
    chosen = [made_plots[0], made_plots[-1]]
    paths = plots.write(chosen, tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in paths] == ["plots/tradeoff-512.png", "plots/needle-niah.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_a_run_of_speed_alone_has_no_plots():
    records = [fake_run.speed("full", 512)]
    assert plots.plots(summary.rows(records), records) == []
