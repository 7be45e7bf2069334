"""Every method at equal bytes: a small run from end to end, gone on with, and its page."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvjax
from docs.generate import catalogue
from docs.generate import equal_bytes as equal_bytes_page
from docs.generate.divisions import divisions_table
from experiments import equal_bytes, quality_against_bytes
from kvjax.eval.page.intervals import score_interval

SMALL = """
[[family]]
name = "tokens"
methods = ["sinks_and_recent:budget=32"]

[[family]]
name = "bits"
methods = ["int8; int4", "int8"]
"""


@pytest.fixture
def run(tmp_path, directory, monkeypatch):
    """Runs the script on a tiny model, with further arguments; returns the results that it sums up."""
    (tmp_path / "families.toml").write_text(SMALL)
    monkeypatch.setattr(equal_bytes, "FAMILIES", tmp_path / "families.toml")
    results = tmp_path / "results.json"

    def run_script(*more: str) -> dict:
        sizes = "--length 96 --contexts 2 --questions 2 --depths 2 --batch 2 --seeds 0,1 --shares 3/4,1/2"
        where = ["--model", str(directory), "--out", str(tmp_path / "runs"), "--results", str(results)]
        equal_bytes.main([*where, *sizes.split(), "--tasks", "turns,ppl", *more])
        return json.loads(results.read_text()) if results.exists() else {}

    return run_script


def test_a_run_is_summed_up_and_gone_on_with(run, directory, tmp_path):
    assert run("--families", "full") == {}  # only a part: no sum
    lines = (tmp_path / "runs" / "full" / "seed0" / "records.jsonl").read_text()
    document = run()
    assert (tmp_path / "runs" / "full" / "seed0" / "records.jsonl").read_text() == lines
    model = kvjax.load(directory)
    assert document["computed_in"] == "float32" and document["bytes_in"] == "bfloat16"
    assert document["full_bytes"] == kvjax.planned_bytes("full", model.config, 96, dtype="bfloat16").total["device"]
    points = {(p["settings"], p["share"]): p for p in document["points"]}
    assert len(points) == 6
    for point in document["points"]:
        numerator, denominator = map(int, point["share"].split("/"))
        assert point["device_bytes"] * denominator <= document["full_bytes"] * numerator
        assert (point["method"] in document["scores"]) == bool(point["method"])
    assert points["int8; int4", "3/4"]["method"] == "int8" and points["int8; int4", "1/2"]["method"] == "int4"
    assert points["int8", "1/2"]["method"] == ""
    text, later = document["scores"]["int8"]["ppl"], document["scores"]["int8"]["turns"]
    assert [len(text[s]) for s in text] == [2]  # the windows of text are the same for every seed
    assert {seed: len(values) for seed, values in later.items()} == {"0": 2, "1": 2}


def test_differences_are_taken_context_by_context(run):
    result = equal_bytes_page.Result(run())
    scores = result.document["scores"]
    by_hand = [
        100 * (ours - full)
        for seed in "01"
        for ours, full in zip(scores["int8"]["turns"][seed], scores["full"]["turns"][seed], strict=True)
    ]
    mean, interval = result.difference("int8", "turns")
    assert mean == pytest.approx(np.mean(by_hand)) and interval.low < mean < interval.high
    assert "| `int8` | " in equal_bytes_page.difference_table(result, "3/4")


@pytest.mark.parametrize("settings", ["equal_bytes.toml", "real_models.toml", "readme.toml"])
def test_all_settings_are_of_methods_that_there_are(settings):
    families = equal_bytes.tomllib.loads(equal_bytes.FAMILIES.with_name(settings).read_text())["family"]
    assert not any("," in family["name"] for family in families)  # --families takes them separated by commas
    for text in [s for family in families for line in family["methods"] for s in line.split(";")]:
        kvjax.parse(text.strip())


def test_the_table_of_results_is_that_of_the_records():
    text = (quality_against_bytes.ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert catalogue.chosen_table() in text
    assert divisions_table() in text
    results = catalogue.read_results()
    assert results
    for result in results.values():
        assert catalogue.winners_table(result) in text
        assert catalogue.describe_code(result) in text
    fronts = list(catalogue.read_results("front").values())
    assert catalogue.best_tables(fronts) in text
    of_fronts = (quality_against_bytes.ROOT / "docs" / "front.md").read_text(encoding="utf-8")
    for result in fronts:
        assert catalogue.front_tables(result) in of_fronts


README_METHODS = (
    *(
        "full",
        "kvzip:budget=238",
        "turned_queries:budget=238",
        "kvzip:budget=200 + int4",
        "kvzip:budget=253,level=head",
    ),
    *("snapkv:budget=253", "keydiff:budget=253", "keydiff:budget=238 + adakv:alpha=0,scope=model", "int4"),
    *("kivi:residual=32,bits=4", "kivi:residual=32,bits=2", "turboquant:ends=0,k_bits=3,v_bits=3"),
    *("quest:budget=256,device_layers=0 + offload", "specache:residual=32,bits=1"),
)


def test_percentages_of_the_readme_have_intervals_of_the_records():
    text = (quality_against_bytes.ROOT / "README.md").read_text(encoding="utf-8")
    text = text[text.index("## What it shows") : text.index("## Which method")]
    scores = quality_against_bytes.read_scores()
    for method in README_METHODS:
        low, high = (100 * end for end in score_interval(scores[method] / 100))
        assert f"{scores[method].mean():.0f}% ({low:.0f}–{high:.0f})" in text, method
    assert "±" not in text  # a standard error is 0 at 0% and at 100%


def test_the_picture_of_the_readme_names_every_line_and_point(tmp_path):
    picture = tmp_path / "picture.svg"
    quality_against_bytes.main(["--out", str(picture)])
    for name in (*quality_against_bytes.LINES, *quality_against_bytes.POINTS.values()):
        assert f"<!-- {name} -->" in picture.read_text()


def test_a_method_of_the_table_and_of_the_picture_has_one_number():
    """README's text and its picture come from two runs."""
    in_picture = quality_against_bytes.read_scores()
    table = equal_bytes_page.Result(json.loads(catalogue.CHOSEN.read_text()))
    means = {m: 100 * table.contexts(m, "turns.essays").mean() for m in table.document["scores"] if m in in_picture}
    assert set(quality_against_bytes.POINTS) < set(means)
    assert means == pytest.approx({m: in_picture[m].mean() for m in means}, abs=0.01)
