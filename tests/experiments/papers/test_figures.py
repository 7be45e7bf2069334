"""Axes of the figures of experiments: percents end at 100, and logarithmic scales say so."""

from __future__ import annotations

import json

import numpy as np
import pytest
from matplotlib import pyplot as plt

from experiments.papers import eviction_curves
from experiments.papers.eviction import Measurements, Outcome
from experiments.papers.specache import figure2 as specache_figure2
from experiments.papers.specache import figure5 as specache_figure5
from experiments.testbed import plot
from experiments.testbed.batches import KINDS
from tests.eval.page.axes import check_percents, check_scales, ticks

RATES = {"text": [{"percent": p, "topk": 1 - 0.05 / p, "greedy": 0.9 - 0.05 / p} for p in (0.1, 1.0, 10.0)]}
MOVED = [
    {"tokens": n} | {x: {"median": n * 1e-6} for x in ("all", "run", "scattered", "step")} for n in (1024, 4096, 16384)
]


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn, which would be closed."""
    drawn_figures = []
    monkeypatch.setattr(plt, "close", drawn_figures.append)
    yield drawn_figures
    monkeypatch.undo()
    plt.close("all")


def test_hit_rates_are_percents_and_times_are_logarithmic():
    axes = plt.figure().subplots(1, 2)
    specache_figure2.draw(axes, RATES, MOVED)
    check_percents(axes[0].yaxis, 100)
    assert axes[0].lines[0].get_ydata().max() == pytest.approx(99.5)
    for ax in axes:
        check_scales(ax)
    plt.close("all")


def record(k: int | None, tasks: bool) -> dict:
    right = {"copying": {"accuracy": 0.9 if k is None else k / 160, "error": 0.1}} if tasks else {}
    return {"topk": k, "tasks": right, "agreement": 0.97, "bits": 2.0}


@pytest.mark.parametrize("tasks", [True, False])
def test_right_answers_by_rows_fetched_are_percents(tasks):
    axes = plt.figure().subplots(1, 2)
    specache_figure5.draw(axes, [record(k, tasks) for k in (None, 0, 16, 128)], ("right answers, %", "bits/token"))
    check_percents(axes[0].yaxis, 100)
    assert max(axes[0].lines[0].get_ydata()) == pytest.approx(80 if tasks else 97)
    for ax in axes:
        check_scales(ax)
    plt.close("all")


def test_right_answers_by_budget_are_percents(figures, tmp_path):
    every, measurements = eviction_curves.curves(["snapkv", "random"], [64, 256], 0.25), Measurements()
    for method in ("full", *(line.method for c in every for line in c.lines)):
        for when in ("first", "later", "unseen"):
            right = np.array([[1.0, 1.0], [1.0, 0.0 if method == "full" else 1.0]])
            measurements.outcomes[method, "phrases", when] = Outcome(right, right)
    eviction_curves.plot(tmp_path / "curves.png", measurements, every, [64, 256])
    first, *others = figures[0].axes
    check_percents(first.yaxis, 100)
    assert ticks(first.yaxis)[-1][1] == "100"
    for ax in others:  # whose numbers are those of the first
        assert list(ax.yaxis.get_majorticklocs()) == list(first.yaxis.get_majorticklocs())
    for ax in figures[0].axes:
        assert "(logarithmic)" in ax.get_xlabel()


def test_the_curve_of_a_training_names_its_scales(figures, tmp_path):
    log = tmp_path / "log.jsonl"
    numbers = {f"loss/{kind}": 2.0 for kind in KINDS} | {f"hits/{kind}": 0.99 for kind in KINDS}
    steps = [{"step": i, "length": (256, 1024)[i // 50]} | numbers | {"hits/text": i / 99} for i in range(100)]
    log.write_text("\n".join(map(json.dumps, steps)))
    plot.draw_curve(log, tmp_path / "curve.png")
    loss, hits, length = figures[0].axes
    check_percents(hits.yaxis, 100)
    assert [text for _, text in ticks(length.yaxis)] == ["256", "1,024"]
    for ax in (loss, hits, length):
        check_scales(ax)
