"""The orders that the papers claim: their verdicts, on a run with these orders in its numbers."""

from __future__ import annotations

from experiments import paper_claims
from experiments.paper_claims import NOT_SHOWN, SHOWN, WITHIN
from kvjax.eval.page.paired_difference import Difference
from tests.eval import fake_run

# The methods of the made-up run that stand for those of results/eval.
STAND_FOR = {
    "kcache:n=64,device_layers=1": "kcache:n=64",
    "snapkv:budget=256": paper_claims.SNAPKV,
    "snapkv:budget=256 + kvcrush": paper_claims.KVCRUSH,
    "streaming_llm:recent=252": paper_claims.STREAMING,
}


def test_the_command_prints_verdicts_and_what_is_lacking(tmp_path, monkeypatch, capsys):
    records = [r | {"method": STAND_FOR.get(r["method"], r["method"])} for r in fake_run.records(cases=40)]
    monkeypatch.setattr(paper_claims.store, "read", lambda run: records)
    paper_claims.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "\n  shown: kcache:n=64 against full; bits per byte: " in out
    assert "SpeCache is better than KIVI at 1 bit\n  shown: specache:bits=1 against kivi:bits=1; score: " in out
    assert f"  shown: full against {paper_claims.SNAPKV}; score, later - first question: " in out
    assert f"  shown: {paper_claims.SNAPKV} against {paper_claims.STREAMING}; score of far needles: " in out
    assert "SpeCache is better than KIVI at 2 bits\n  not in this run: specache:bits=2\n" in out


def test_verdicts_need_a_whole_interval():
    ends = {(0.1, 0.5): SHOWN, (0.0, 0.4): WITHIN, (-0.01, 0.4): WITHIN, (-0.5, -0.1): NOT_SHOWN, (None, None): WITHIN}
    for (low, high), expected in ends.items():
        assert paper_claims.judge(Difference(0.0, low, high, 0.5, 0.5, 9), 0.0) == expected
    assert paper_claims.judge(Difference(0.0, -0.01, 0.4, 0.5, 0.5, 9), paper_claims.NEAR_LOSS) == SHOWN
