"""The orders expected from the papers: paired differences, verdicts, which methods are compared."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvjax.eval.page import paired_difference, paper_claims, summary
from kvjax.eval.page.paired_difference import NOT_RUN, NOT_SHOWN, SHOWN, WITHIN, Difference
from tests.eval import fake_run


def findings(records):
    records = list(records)
    return paper_claims.check(summary.rows(records), records)


@pytest.fixture(scope="module")
def found():
    return findings(fake_run.records(cases=40))


def verdict(found, claim, subject="", measure="score"):
    (one,) = [f for f in found if claim in f.claim and subject in f.subject and f.measure.startswith(measure)]
    return one.verdict


def test_orders_that_are_in_the_numbers_are_shown(found):
    assert verdict(found, "gains from first layers") == SHOWN
    assert verdict(found, "KIVI at 1 bit") == SHOWN
    assert verdict(found, "KIVI at 1 bit", measure="bits") == SHOWN
    assert verdict(found, "KVCrush") == SHOWN
    assert verdict(found, "far needles") == SHOWN
    assert all(verdict(found, "Eviction loses", f"{m} against") == SHOWN for m in fake_run.EVICTS)
    assert verdict(found, "near full", measure="bits") == SHOWN


def test_what_the_run_lacks_is_named(found):
    (two_bits,) = [f for f in found if "2 bits" in f.claim]
    assert two_bits.verdict == NOT_RUN and "specache:bits=2" in two_bits.subject


def test_the_opposite_is_not_shown():
    swap = {"kivi:bits=1": "specache:bits=1", "specache:bits=1": "kivi:bits=1"}
    records = [r | {"method": swap.get(r["method"], r["method"])} for r in fake_run.records()]
    found = findings(records)
    assert verdict(found, "KIVI at 1 bit") == NOT_SHOWN
    (one,) = [f for f in found if "1 bit" in f.claim and f.measure == "score"]
    assert "the run says the opposite" in one.text and one.parts


def pair(a, b, task="t", length=1):
    base = {"task": task, "about": {"length": length}}
    return [
        base | {"method": m, "key": str(i), "scores": [s]}
        for m, x in zip("ab", (a, b), strict=True)
        for i, s in enumerate(x)
    ]


def test_differences_are_paired_and_stratified():
    a, b = np.array([1.0, 0.5, 0.0, 0.25]), np.array([0.75, 0.5, 0.0, 0.0])
    run = paired_difference.RecordedRun([*pair(a, b), *pair([1.0, 1.0], [0.0, 0.0], "u")])
    d = run.difference("a", "b", paired_difference.score)
    assert d.mean == pytest.approx(((a - b).mean() + 1) / 2) and d.cases == 6
    assert d.error == pytest.approx(math.sqrt((a - b).var(ddof=1) / 4) / 2)
    assert run.difference("a", "b", paired_difference.score, "u").mean == 1
    assert run.difference("a", "b", paired_difference.bits) is None


def test_only_cases_that_both_have_count():
    records = pair([1.0, 0.0], [1.0, 0.0])
    d = paired_difference.RecordedRun(records[:3]).difference("a", "b", paired_difference.score)
    assert (d.cases, d.mean, d.error) == (1, 0, None)


def of(mean, error):
    return Difference(mean, error, 0.5 + mean, 0.5, 9)


def test_verdicts_need_two_errors():
    assert [paired_difference.judge_better(of(*x)) for x in ((0.3, 0.1), (0.2, 0.1), (-0.3, 0.1), (0.3, None))] == [
        SHOWN,
        WITHIN,
        NOT_SHOWN,
        WITHIN,
    ]
    assert [paired_difference.judge_near(of(*x)) for x in ((0.0, 0.01), (0.0, 0.02), (-0.1, 0.01), (-0.02, 0.0))] == [
        SHOWN,
        WITHIN,
        NOT_SHOWN,
        SHOWN,
    ]


def test_kvcrush_needs_its_own_base():
    methods = ["snapkv:budget=128", "snapkv:budget=256 + kvcrush"]
    records = [r | {"method": m} for m in methods for r in fake_run.records(["full"], ["ruler.vt"], [512], 3)]
    assert {f.verdict for f in findings(records) if "KVCrush" in f.claim} == {NOT_RUN}


def test_kivi_with_as_many_exact_rows_is_compared():
    methods = ["kivi:bits=1,residual=32", "kivi:bits=1", "specache:bits=1"]  # the last: 64 recent and 64 fetched
    records = [r | {"method": m} for m in methods for r in fake_run.records(["full"], ["ruler.vt"], [512], 3)]
    (one,) = [f for f in findings(records) if "1 bit" in f.claim]
    assert one.subject == "specache:bits=1 against kivi:bits=1"


def test_needles_within_the_window_say_nothing():
    records = list(fake_run.records(tasks=["niah"], lengths=[512]))
    near = [r for r in records if r["task"] == "niah" and r["about"]["depth"] > 0.5]
    assert verdict(findings(near), "far needles", "streaming", "") == NOT_RUN
    assert verdict(findings(records), "far needles", "streaming") == SHOWN


def test_methods_known_by_name_only_are_left_alone():
    records = [r | {"method": "my own: method"} for r in fake_run.records(["full"], ["ruler.vt"], [512], 3)]
    assert {f.verdict for f in findings(records)} == {NOT_RUN}


def test_a_method_without_a_string_takes_part_by_its_traits():
    said = {"evicts": True, "exact": False, "constant": False, "host": False, "after_prompt": True}
    records = list(fake_run.records(["full", "snapkv:budget=256"], ["turns.recall"], [512], 40))
    own = [r | {"method": "my own"} | {"traits": said} for r in records if r["method"] != "full"]
    found = findings([*records, *own])
    assert verdict(found, "Eviction loses", "my own against full", "score") == SHOWN
    offloads = [r | {"traits": said | {"evicts": False, "host": True}} for r in own]
    assert verdict(findings([*records, *offloads]), "Offloading", "my own against full", "score") == NOT_SHOWN
