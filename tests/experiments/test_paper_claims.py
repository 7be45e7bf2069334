"""The orders expected from the papers: verdicts, and which methods are compared."""

from __future__ import annotations

import pytest

from experiments import paper_claims
from experiments.paper_claims import LATER_GAIN, NOT_RUN, NOT_SHOWN, SHOWN, WITHIN, Run
from kvjax.eval.page import intervals
from kvjax.eval.page.paired_difference import Difference
from tests.eval import fake_run


@pytest.fixture(scope="module")
def findings():
    return paper_claims.check(fake_run.records(cases=40))


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
    swapped_findings = paper_claims.check(records)
    assert verdict(swapped_findings, "KIVI at 1 bit") == NOT_SHOWN
    (one,) = [f for f in swapped_findings if "1 bit" in f.claim and f.measure == "score"]
    assert "the run says the opposite" in one.text and one.parts


def make_difference(low, high):
    return Difference(0.0 if low is None else (low + high) / 2, low, high, 0.5, 0.5, 9)


def test_verdicts_need_a_whole_interval():
    better = {(0.1, 0.5): SHOWN, (0.0, 0.4): WITHIN, (-0.5, -0.1): NOT_SHOWN, (None, None): WITHIN}
    for ends, expected in better.items():
        assert paper_claims.judge_better(make_difference(*ends)) == expected
    near = {(-0.02, 0.02): SHOWN, (-0.03, 0.03): WITHIN, (-0.12, -0.08): NOT_SHOWN, (None, None): WITHIN}
    for ends, expected in near.items():
        assert paper_claims.judge_near(make_difference(*ends)) == expected
    level = Difference(0.0, -0.09, 0.09, 0.5, 0.5, 20)  # the same in 20 contexts
    assert paper_claims.judge_near(level) == paper_claims.judge_better(level) == WITHIN
    assert paper_claims.format_difference(level, "score") == "+0.0 (−9.0 to +9.0)"
    single = Difference(0.1, None, None, -1.0, -1.1, 1)
    assert "a single context has no interval" in paper_claims.describe_difference(single, "bits per byte", WITHIN)


def test_gains_at_later_questions_lie_between_minus_one_and_one():
    def turns(method, later):
        base = {"method": method, "task": "turns", "about": {"length": 1}, "turns": True}
        return [base | {"key": str(i), "scores": [1.0, x]} for i, x in enumerate(later)]

    run = Run([*turns("a", [0.0] * 20), *turns("b", [1.0] * 20)])
    d = run.difference("a", "b", LATER_GAIN)
    halves = intervals.paired_interval([0.0] * 20, [0.5] * 20)
    assert (d.mean, d.low, d.high) == pytest.approx((-1, 2 * halves.low, 2 * halves.high))
    assert paper_claims.judge_better(d.reverse()) == SHOWN


def test_kvcrush_needs_its_own_base():
    methods = ["snapkv:budget=128", "snapkv:budget=256 + kvcrush"]
    records = [r | {"method": m} for m in methods for r in fake_run.records(["full"], ["ruler.vt"], [512], 3)]
    assert {f.verdict for f in paper_claims.check(records) if "KVCrush" in f.claim} == {NOT_RUN}


def test_kivi_with_as_many_exact_rows_is_compared():
    methods = ["kivi:bits=1,residual=32", "kivi:bits=1", "specache:bits=1"]  # the last: 64 recent and 64 fetched
    records = [r | {"method": m} for m in methods for r in fake_run.records(["full"], ["ruler.vt"], [512], 3)]
    (one,) = [f for f in paper_claims.check(records) if "1 bit" in f.claim]
    assert one.subject == "specache:bits=1 against kivi:bits=1"


def test_needles_within_the_window_say_nothing():
    records = list(fake_run.records(tasks=["niah"], lengths=[512]))
    near = [r for r in records if r["task"] == "niah" and r["about"]["depth"] > 0.5]
    assert verdict(paper_claims.check(near), "far needles", "streaming", "") == NOT_RUN
    assert verdict(paper_claims.check(records), "far needles", "streaming") == SHOWN


def test_methods_known_by_name_only_are_left_alone():
    records = [r | {"method": "my own: method"} for r in fake_run.records(["full"], ["ruler.vt"], [512], 3)]
    assert {f.verdict for f in paper_claims.check(records)} == {NOT_RUN}


def test_a_method_without_a_string_takes_part_by_its_traits():
    traits = {"evicts": True, "exact": False, "constant": False, "host": False, "after_prompt": True}
    records = list(fake_run.records(["full", "snapkv:budget=256"], ["turns.recall"], [512], 40))
    own = [r | {"method": "my own"} | {"traits": traits} for r in records if r["method"] != "full"]
    own_findings = paper_claims.check([*records, *own])
    assert verdict(own_findings, "Eviction loses", "my own against full", "score") == SHOWN
    offloads = [r | {"traits": traits | {"evicts": False, "host": True}} for r in own]
    assert verdict(paper_claims.check([*records, *offloads]), "Offloading", "my own against full", "score") == NOT_SHOWN


def test_the_command_prints_verdicts_and_what_is_lacking(tmp_path, capsys):
    paper_claims.main([str(fake_run.write(tmp_path, lengths=[512], cases=3))])
    out = capsys.readouterr().out
    assert (
        "SpeCache is better than KIVI at 1 bit\n  " in out and "not in this run: it needs kivi:bits=2; specache" in out
    )
