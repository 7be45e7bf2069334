"""Proportions of the papers' tables: 95% intervals, which have a width where all contexts agree."""

from __future__ import annotations

import numpy as np

from experiments.papers import common
from experiments.papers.eviction import Measurements, Outcome
from experiments.papers.eviction_tables import Line, format_score


def test_a_score_and_a_gain_have_intervals_at_100_percent():
    found = Measurements()
    for method, right in (("full", np.ones((8, 2))), ("half", np.tile([1.0, 0.0], (8, 1)))):
        found.outcomes[method, "recall", "later"] = Outcome(right, np.zeros_like(right))
    assert format_score(found, Line("full", "full"), "later") == "100.0 (68–100)"
    assert format_score(found, Line("same", "full", "full"), "later") == "100.0 (68–100), +0.0 (-32 to +32)"
    score, gain = format_score(found, Line("half", "half", "full"), "later").split(", ")
    assert score.startswith("50.0 (") and gain.startswith("-50.0 (-")
    assert format_score(found, Line("full", "full"), "first") is None


def test_accuracy_has_wilsons_interval():
    assert common.format_accuracy(common.accuracy([True] * 20)) == "100.0% (84–100)"
    assert common.format_accuracy(common.accuracy([False] * 8)) == "0.0% (0–32)"
    assert common.format_accuracy(common.accuracy([True, False] * 8)) == "50.0% (28–72)"
