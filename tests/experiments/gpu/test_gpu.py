"""What the stages for a GPU compute of their measurements, and how they go on after a cut; no GPU is needed."""

from __future__ import annotations

import json

import pytest

import kvjax
from experiments.gpu import __main__ as runner
from experiments.gpu import decode, methods, overlap
from experiments.gpu.models import SHAPES


def run(tokens, logprobs, lead=1.0):
    return {"tokens": [tokens], "logprobs": [logprobs], "lead": [[lead] * len(tokens)], "seconds": 1.0}


def test_a_method_agrees_where_its_tokens_and_their_probabilities_do():
    found = methods.compare(run([1, 2], [-1.0, -2.0]), run([1, 2], [-1.0, -2.0005]), "float32")
    assert found == {"verdict": "agrees", "worst": pytest.approx(5e-4), "equal_tokens": "2/2"}


def test_a_method_differs_where_a_probability_is_off_though_its_tokens_are_equal():
    assert methods.compare(run([1, 2], [-1.0, -2.0]), run([1, 2], [-1.0, -2.1]), "float32")["verdict"] == "DIFFERS"


def test_tokens_may_part_at_a_tie_alone():
    ours, theirs = run([1, 2, 9], [-1.0, -2.0, -9.0], lead=1e-4), run([1, 3, 4], [-1.0, -2.0, -4.0], lead=1e-4)
    assert methods.compare(ours, theirs, "float32") == {
        "verdict": "agrees up to a tie",
        "worst": 0.0,
        "equal_tokens": "1/3",
    }
    certain = run([1, 3, 4], [-1.0, -2.0, -4.0], lead=0.5)
    assert methods.compare(ours, certain, "float32")["verdict"] == "DIFFERS"


def test_a_method_agrees_with_itself_and_an_unknown_one_is_an_error():
    found = methods.run_method("int8", "float32")
    assert methods.compare(found, found, "float32") == {"verdict": "agrees", "worst": 0.0, "equal_tokens": "32/32"}
    assert "KvjaxError" in methods.run_method("no_such_method", "float32")["error"]


def test_a_method_that_fails_on_one_side_fails():
    fine, refused = run([1], [-1.0]), {"error": "KvjaxError: no", "seconds": 1.0}
    assert methods.compare(refused, fine, "float32")["verdict"] == "FAILS"
    assert methods.compare(fine, refused, "float32")["error"] == "only on the CPU: KvjaxError: no"
    assert methods.compare(refused, refused, "float32")["verdict"] == "refused on both"


def test_what_other_kernels_run_beside_a_fetch_is_hidden():
    per_step = 1e-6 / overlap.STEPS
    events = [
        ("Stream #1", "gemm", 0.0, 10.0),
        ("Stream #2", "fetch_rows_1", 5.0, 20.0),
        ("Stream #1", "gemm", 18.0, 30.0),
    ]
    found = overlap.summarize(events)
    assert found["fetch"] == pytest.approx(15 * per_step)
    assert found["hidden"] == pytest.approx(7 * per_step)  # 5 to 10, and 18 to 20
    assert found["busy"] == pytest.approx(30 * per_step)
    assert found["kernels"]["gemm"] == {"ms": pytest.approx(22 * per_step), "count": 2 / overlap.STEPS}


def test_a_batch_fits_device_and_host():
    c, room = SHAPES["toy"], 8
    row = kvjax.planned_bytes("kcache:n=16", c, 512, capacity=520, dtype="bfloat16").total
    device, host = 10.5 * row["device"], 3.5 * row["pinned_host"]
    assert decode.fit_batch("kcache:n=16", c, 512, room, device, 1e12) == 10
    assert decode.fit_batch("kcache:n=16", c, 512, room, device, host) == 3


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


def test_a_stage_that_takes_too_long_is_cut_off_and_its_log_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "STAGES", {"slow": ["-c", "print('begun', flush=True); import time; time.sleep(60)"]})
    with pytest.raises(SystemExit, match="slow"):
        runner.main(["--out", str(tmp_path), "--stages", "slow", "--seconds", "2"])
    assert (tmp_path / "slow.log").read_text() == "begun\n"


def test_without_a_gpu_the_stages_say_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="no NVIDIA GPU answers"):
        runner.main([])
