"""The stages for a GPU: the comparison of a method, and a run that goes on after a failure; no GPU is needed."""

from __future__ import annotations

import json

import pytest

from experiments.gpu import __main__ as runner
from experiments.gpu import methods


def test_a_method_agrees_with_itself_alone_and_an_unknown_one_is_an_error():
    found = methods.run_method("int8", "float32")
    assert methods.compare(found, found, "float32") == {"verdict": "agrees", "worst": 0.0, "equal_tokens": "32/32"}
    less_likely = found | {"logprobs": [[x - 0.1 for x in row] for row in found["logprobs"]]}
    assert methods.compare(found, less_likely, "float32")["verdict"] == "DIFFERS"
    assert "KvjaxError" in methods.run_method("no_such_method", "float32")["error"]


def test_stages_that_have_a_result_are_left_out(tmp_path, monkeypatch, capsys):
    document = "import json; print('a table'); print(json.dumps({'benchmark': 'x'}))"
    stages = {"works": ["-c", document], "fails": ["-c", "raise SystemExit(3)"]}
    monkeypatch.setattr(runner, "STAGES", stages)
    with pytest.raises(SystemExit, match="failed or were cut off: fails"):
        runner.main(["--out", str(tmp_path), "--stages", "works,fails"])
    assert json.loads((tmp_path / "works.json").read_text()) == {"benchmark": "x"}
    stages["works"] = ["-c", "raise SystemExit(4)"]  # would fail, if it ran again
    stages["fails"] = ["-c", document]
    runner.main(["--out", str(tmp_path), "--stages", "works,fails"])
    assert "nothing is left" in capsys.readouterr().out


def test_without_a_gpu_the_stages_say_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="no NVIDIA GPU answers"):
        runner.main([])
