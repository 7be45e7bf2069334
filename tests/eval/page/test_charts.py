"""Charts of a run: what they draw, who is on the front, and files."""

from __future__ import annotations

import sys

import altair as alt
import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.page import charts, summary
from tests.eval import fake_run

METHODS = ["full", "kivi:bits=1", "snapkv:budget=256 + kvcrush"]


@pytest.fixture(scope="module")
def pictures():
    run = {"methods": METHODS, "lengths": [512, 1024], "cases": 10}
    records = list(fake_run.records(tasks=["niah", "ruler.vt", "turns.recall", "ppl"], **run))
    return {p.name: p for p in charts.pictures(summary.rows(records), records)}


def drawn_values(panel: dict, chart: dict) -> list[dict]:
    """The values of a panel's last layer with points."""
    points = [layer for layer in panel["layer"] if layer["mark"]["type"] == "point"][-1]
    data = points.get("data") or panel["data"]
    return data.get("values") or chart["datasets"][data["name"]]


def test_every_kind_is_there(pictures):
    lengths = {name: p.length for name, p in pictures.items()}
    each = {f"{kind}-{n}": n for n in (512, 1024) for kind in ("tradeoff", "turns")}
    assert lengths == {**each, "length": None, "needle-niah": None}


def test_a_panel_has_each_method_with_its_value_interval_and_bytes(pictures):
    chart = pictures["tradeoff-512"].chart.to_dict()
    assert [panel["title"] for panel in chart["concat"]] == ["niah", "ruler", "turns", "ppl"]
    niah, text = (drawn_values(chart["concat"][i], chart) for i in (0, 3))
    assert [v["method"] for v in niah] == METHODS
    assert all(0 <= v["low"] <= v["value"] <= v["high"] <= 100 for v in niah)
    kivi = niah[1]
    assert kivi["bytes"] == pytest.approx(100 * 0.27 / 2.08, abs=1e-3) and kivi["words"].startswith(
        f"{kivi['value']:.1f} ("
    )
    # Bits per byte are differences to full on the same texts.
    assert text[0]["value"] == 0 < text[1]["value"] < 0.1
    axis = str(chart["concat"][0])
    assert "(logarithmic)" in axis and "score, 0 to 100" in axis


def test_the_front_has_the_methods_that_no_other_beats_in_quality_and_bytes():
    def row(method, percent, score):
        return {"method": method, "device_percent": percent, "score": score, "bits": 1 - score}

    rows = [
        row("full", 100, 0.9),
        row("a", 10, 0.5),
        row("beaten", 20, 0.4),
        row("as good", 30, 0.5),
        row("b", 40, 0.8),
    ]
    for measure in ("score", "bits"):
        assert [r["method"] for r in charts.find_front(rows, measure)] == ["a", "b", "full"]


def test_methods_have_a_style_of_their_own_in_all_charts():
    methods = ["full", *(f"m{i}" for i in range(42))]
    scales = (charts.color_of(methods).to_dict()["scale"], charts.shape_of(methods).to_dict()["scale"])
    assert all(scale["domain"] == methods for scale in scales)
    assert len(set(zip(*(scale["range"] for scale in scales), strict=True))) == 43


def test_depth_as_asked_for_or_to_the_nearest_twentieth():
    task = {"task": "niah", "method": "full", "scores": [1.0]}
    exact_depth = {"key": "a", "about": {"length": 512, "depth": 1 / 3}, "asks": [{"depth": 0.3}]}
    odd_depth = {"key": "b", "about": {"length": 512}, "asks": [{"depth": 0.741}]}
    chart = charts.draw_needles([task | exact_depth, task | odd_depth | {"scores": [0.0]}])["niah"].to_dict()
    (values,) = chart["datasets"].values() if "datasets" in chart else [chart["data"]["values"]]
    assert [(v["depth"], v["score"]) for v in values] == [(33, 100), (75, 0)]
    assert charts.draw_needles([task | exact_depth]) == {}  # one depth is no map
    by_chance = [task | {"key": str(n), "about": {"length": n}, "asks": [{"depth": n / 4096}]} for n in (512, 1024)]
    assert charts.draw_needles(by_chance) == {}


def test_png_files(pictures, tmp_path):
    paths = charts.write([pictures["turns-512"], pictures["needle-niah"]], tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in paths] == ["plots/turns-512.png", "plots/needle-niah.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_a_picture_without_its_library_is_an_error_with_the_command(monkeypatch, tmp_path):
    picture = charts.Picture("methods", "methods", None, alt.Chart(alt.Data(values=[])).mark_point())
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(KvjaxError, match=r'pictures need vl_convert: pip install "kvjax\[eval\]"'):
        picture.save(tmp_path / "a.png")
    assert picture.save(tmp_path / "a.json").is_file()


def test_a_run_of_speed_alone_has_no_charts():
    records = [fake_run.speed("full", 512)]
    assert charts.pictures(summary.rows(records), records) == []
