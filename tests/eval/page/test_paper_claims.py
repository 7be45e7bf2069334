"""The orders expected from the papers: paired differences, verdicts, which methods are compared."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvjax.eval.page import intervals, paired_difference, paper_claims, summary
from kvjax.eval.page.paired_difference import NOT_RUN, NOT_SHOWN, SHOWN, WITHIN, Difference
from tests.eval import fake_run


def check_claims(records):
    records = list(records)
    return paper_claims.check(summary.rows(records), records)


@pytest.fixture(scope="module")
def findings():
    return check_claims(fake_run.records(cases=40))


def verdict(findings, claim, subject="", measure="score"):
    (one,) = [f for f in findings if claim in f.claim and subject in f.subject and f.measure.startswith(measure)]
    return one.verdict


def test_orders_that_are_in_the_numbers_are_shown(findings):
    assert verdict(findings, "gains from first layers") == SHOWN
    assert verdict(findings, "KIVI at 1 bit") == SHOWN
    assert verdict(findings, "KIVI at 1 bit", measure="bits") == SHOWN
    assert verdict(findings, "KVCrush") == SHOWN
    assert verdict(findings, "far needles") == SHOWN
    assert all(verdict(findings, "Eviction loses", f"{m} against") == SHOWN for m in fake_run.EVICTS)
    assert verdict(findings, "near full", measure="bits") == SHOWN


def test_what_the_run_lacks_is_named(findings):
    (two_bits,) = [f for f in findings if "2 bits" in f.claim]
    assert two_bits.verdict == NOT_RUN and "specache:bits=2" in two_bits.subject


def test_the_opposite_is_not_shown():
    swap = {"kivi:bits=1": "specache:bits=1", "specache:bits=1": "kivi:bits=1"}
    records = [r | {"method": swap.get(r["method"], r["method"])} for r in fake_run.records()]
    swapped_findings = check_claims(records)
    assert verdict(swapped_findings, "KIVI at 1 bit") == NOT_SHOWN
    (one,) = [f for f in swapped_findings if "1 bit" in f.claim and f.measure == "score"]
    assert "the run says the opposite" in one.text and one.parts


def paired_records(a, b, task="t", length=1):
    base, records = {"task": task, "about": {"length": length}}, []
    for method, scores in (("a", a), ("b", b)):
        records += [base | {"method": method, "key": str(i), "scores": [score]} for i, score in enumerate(scores)]
    return records


def test_differences_are_paired_and_stratified():
    a, b = np.array([1.0, 0.5, 0.0, 0.25]), np.array([0.75, 0.5, 0.0, 0.0])
    run = paired_difference.RecordedRun([*paired_records(a, b), *paired_records([1.0, 1.0], [0.0, 0.0], "u")])
    d = run.difference("a", "b", paired_difference.score)
    assert d.mean == pytest.approx(((a - b).mean() + 1) / 2) and d.cases == 6
    parts = [intervals.paired_interval(a, b), intervals.paired_interval([1.0, 1.0], [0.0, 0.0])]
    means = [(a - b).mean(), 1.0]
    low, high = (math.hypot(*(m - p[end] for m, p in zip(means, parts, strict=True))) / 2 for end in (0, 1))
    assert (d.low, d.high) == (pytest.approx(d.mean - low), pytest.approx(d.mean + high))
    assert run.difference("a", "b", paired_difference.score, "u").mean == 1
    assert run.difference("a", "b", paired_difference.bits) is None


def test_only_cases_that_both_have_count():
    records = paired_records([1.0, 0.0], [1.0, 0.0])
    d = paired_difference.RecordedRun(records[:3]).difference("a", "b", paired_difference.score)
    assert (d.cases, d.mean) == (1, 0) and d.low < -0.5 and d.high > 0.5


def test_bits_are_paired_and_a_single_text_has_no_interval():
    def texts(method, bits, length=1):
        base = {"method": method, "task": "ppl", "about": {"length": length}, "scores": []}
        return [base | {"key": f"{length}/{i}", "bits": x} for i, x in enumerate(bits)]

    records = [*texts("a", [1.0, 2.0, 3.0]), *texts("b", [1.1, 2.2, 3.3])]
    d = paired_difference.RecordedRun(records).difference("a", "b", paired_difference.bits)
    # Student's interval of 0.1, 0.2 and 0.3, by hand: 4.303 is the quantile at two degrees of freedom.
    assert (d.mean, d.low, d.high) == pytest.approx(
        (0.2, 0.2 - 4.303 * 0.1 / 3**0.5, 0.2 + 4.303 * 0.1 / 3**0.5), abs=1e-4
    )
    one = paired_difference.RecordedRun([*texts("a", [1.0]), *texts("b", [1.1])])
    d = one.difference("a", "b", paired_difference.bits)
    assert (d.low, d.high) == (None, None) and "a single context has no interval" in (
        paired_difference.describe_difference(d, "bits per byte", WITHIN)
    )
    # A length with a single text has no spread of its own: all differences together have one.
    both = [*texts("a", [1.0, 2.0]), *texts("a", [1.0], 2), *texts("b", [1.1, 2.2]), *texts("b", [1.3], 2)]
    d = paired_difference.RecordedRun(both).difference("a", "b", paired_difference.bits)
    assert d.mean == pytest.approx((0.15 + 0.3) / 2) and d.high - d.mean == pytest.approx(
        4.303 * 0.1 / 3**0.5, abs=1e-4
    )


def make_difference(low, high):
    return Difference(0.0 if low is None else (low + high) / 2, low, high, 0.5, 0.5, 9)


def test_verdicts_need_a_whole_interval():
    better = {(0.1, 0.5): SHOWN, (0.0, 0.4): WITHIN, (-0.5, -0.1): NOT_SHOWN, (None, None): WITHIN}
    for ends, expected in better.items():
        assert paired_difference.judge_better(make_difference(*ends)) == expected
    near = {(-0.02, 0.02): SHOWN, (-0.03, 0.03): WITHIN, (-0.12, -0.08): NOT_SHOWN, (None, None): WITHIN}
    for ends, expected in near.items():
        assert paired_difference.judge_near(make_difference(*ends)) == expected


def test_the_same_in_every_context_is_no_proof_of_the_same_score():
    for scores in ([1.0] * 20, [0.0] * 20, [0.5] * 20, [1.0, 0.0] * 10):
        run = paired_difference.RecordedRun(paired_records(scores, scores))
        d = run.difference("a", "b", paired_difference.score)
        assert d.mean == 0 and paired_difference.judge_near(d) == paired_difference.judge_better(d) == WITHIN
        assert not paired_difference.keeps_up(d)
    assert "±" not in paired_difference.format_difference(d, "score")
    assert paired_difference.format_difference(d, "score") == "+0.0 (−9.0 to +9.0)"


def test_gains_at_later_questions_lie_between_minus_one_and_one():
    def turns(method, later):
        base = {"method": method, "task": "turns", "about": {"length": 1}, "turns": True}
        return [base | {"key": str(i), "scores": [1.0, x]} for i, x in enumerate(later)]

    run = paired_difference.RecordedRun([*turns("a", [0.0] * 20), *turns("b", [1.0] * 20)])
    d = run.difference("a", "b", paired_difference.later_gain)
    halves = intervals.paired_interval([0.0] * 20, [0.5] * 20)
    assert (d.mean, d.low, d.high) == pytest.approx((-1, 2 * halves.low, 2 * halves.high))
    assert paired_difference.judge_better(d.reverse()) == SHOWN


def test_kvcrush_needs_its_own_base():
    methods = ["snapkv:budget=128", "snapkv:budget=256 + kvcrush"]
    records = [r | {"method": m} for m in methods for r in fake_run.records(["full"], ["ruler.vt"], [512], 3)]
    assert {f.verdict for f in check_claims(records) if "KVCrush" in f.claim} == {NOT_RUN}


def test_kivi_with_as_many_exact_rows_is_compared():
    methods = ["kivi:bits=1,residual=32", "kivi:bits=1", "specache:bits=1"]  # the last: 64 recent and 64 fetched
    records = [r | {"method": m} for m in methods for r in fake_run.records(["full"], ["ruler.vt"], [512], 3)]
    (one,) = [f for f in check_claims(records) if "1 bit" in f.claim]
    assert one.subject == "specache:bits=1 against kivi:bits=1"


def test_needles_within_the_window_say_nothing():
    records = list(fake_run.records(tasks=["niah"], lengths=[512]))
    near = [r for r in records if r["task"] == "niah" and r["about"]["depth"] > 0.5]
    assert verdict(check_claims(near), "far needles", "streaming", "") == NOT_RUN
    assert verdict(check_claims(records), "far needles", "streaming") == SHOWN


def test_methods_known_by_name_only_are_left_alone():
    records = [r | {"method": "my own: method"} for r in fake_run.records(["full"], ["ruler.vt"], [512], 3)]
    assert {f.verdict for f in check_claims(records)} == {NOT_RUN}


def test_a_method_without_a_string_takes_part_by_its_traits():
    traits = {"evicts": True, "exact": False, "constant": False, "host": False, "after_prompt": True}
    records = list(fake_run.records(["full", "snapkv:budget=256"], ["turns.recall"], [512], 40))
    own = [r | {"method": "my own"} | {"traits": traits} for r in records if r["method"] != "full"]
    own_findings = check_claims([*records, *own])
    assert verdict(own_findings, "Eviction loses", "my own against full", "score") == SHOWN
    offloads = [r | {"traits": traits | {"evicts": False, "host": True}} for r in own]
    assert verdict(check_claims([*records, *offloads]), "Offloading", "my own against full", "score") == NOT_SHOWN
