"""Differences of two methods: paired, stratified by task and length, with intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvjax.eval.page import intervals
from kvjax.eval.page.paired_difference import BITS, SCORE, Difference, RecordedRun, keeps_up


def paired_records(a, b, task="t", length=1):
    base, records = {"task": task, "about": {"length": length}}, []
    for method, scores in (("a", a), ("b", b)):
        records += [base | {"method": method, "key": str(i), "scores": [score]} for i, score in enumerate(scores)]
    return records


def test_differences_are_paired_and_stratified():
    a, b = np.array([1.0, 0.5, 0.0, 0.25]), np.array([0.75, 0.5, 0.0, 0.0])
    run = RecordedRun([*paired_records(a, b), *paired_records([1.0, 1.0], [0.0, 0.0], "u")])
    d = run.difference("a", "b", SCORE)
    assert d.mean == pytest.approx(((a - b).mean() + 1) / 2) and d.cases == 6
    parts = [intervals.paired_interval(a, b), intervals.paired_interval([1.0, 1.0], [0.0, 0.0])]
    means = [(a - b).mean(), 1.0]
    low, high = (math.hypot(*(m - p[end] for m, p in zip(means, parts, strict=True))) / 2 for end in (0, 1))
    assert (d.low, d.high) == (pytest.approx(d.mean - low), pytest.approx(d.mean + high))
    assert run.difference("a", "b", SCORE, "u").mean == 1
    assert run.difference("a", "b", BITS) is None


def test_only_cases_that_both_have_count():
    records = paired_records([1.0, 0.0], [1.0, 0.0])
    d = RecordedRun(records[:3]).difference("a", "b", SCORE)
    assert (d.cases, d.mean) == (1, 0) and d.low < -0.5 and d.high > 0.5


def test_bits_are_paired_and_a_single_text_has_no_interval():
    def texts(method, bits, length=1):
        base = {"method": method, "task": "ppl", "about": {"length": length}, "scores": []}
        return [base | {"key": f"{length}/{i}", "bits": x} for i, x in enumerate(bits)]

    records = [*texts("a", [1.0, 2.0, 3.0]), *texts("b", [1.1, 2.2, 3.3])]
    d = RecordedRun(records).difference("a", "b", BITS)
    # Student's interval of 0.1, 0.2 and 0.3, by hand: 4.303 is the quantile at two degrees of freedom.
    assert (d.mean, d.low, d.high) == pytest.approx(
        (0.2, 0.2 - 4.303 * 0.1 / 3**0.5, 0.2 + 4.303 * 0.1 / 3**0.5), abs=1e-4
    )
    one = RecordedRun([*texts("a", [1.0]), *texts("b", [1.1])])
    d = one.difference("a", "b", BITS)
    assert (d.low, d.high) == (None, None)
    # A length with a single text has no spread of its own: all differences together have one.
    both = [*texts("a", [1.0, 2.0]), *texts("a", [1.0], 2), *texts("b", [1.1, 2.2]), *texts("b", [1.3], 2)]
    d = RecordedRun(both).difference("a", "b", BITS)
    assert d.mean == pytest.approx((0.15 + 0.3) / 2) and d.high - d.mean == pytest.approx(
        4.303 * 0.1 / 3**0.5, abs=1e-4
    )


def test_the_same_in_every_context_is_no_proof_of_the_same_score():
    for scores in ([1.0] * 20, [0.0] * 20, [0.5] * 20, [1.0, 0.0] * 10):
        d = RecordedRun(paired_records(scores, scores)).difference("a", "b", SCORE)
        assert d.mean == 0 and not keeps_up(d)


@pytest.mark.parametrize(
    ("low", "cases", "expected"),
    [(-0.04, 15, False), (-0.04, 16, True), (-0.05, 64, True), (-0.06, 64, False), (0.01, 64, True), (None, 64, False)],
)
def test_who_keeps_up(low, cases, expected):
    assert keeps_up(Difference(0.02, low, None if low is None else 0.1, 0.52, 0.5, cases)) == expected
