"""`kvjax eval` in two processes: the records of one, whichever process is killed on the way."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvjax import cli
from tests.processes import launch

WORDS = "--tasks niah,ppl --lengths 128 --contexts 3 --depths 1 --batch 2 --mesh 2x2 --no-speed".split()
METHODS = "full; snapkv:budget=25%"


def lines(folder: Path) -> list[bytes]:
    file = folder / "records.jsonl"
    return file.read_bytes().splitlines(keepends=True) if file.exists() else []


def start(folder: Path) -> list[subprocess.Popen[str]]:
    words = ["-m", "kvjax", "eval", "--out", str(folder), "--methods", METHODS, *WORDS]
    return launch.start_two(*words, "--coordinator", "{coordinator}", "--process", "{process}", devices=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    """A run in which each of two processes is killed once, resumed until its end, and that of one process."""
    folder, kills = tmp_path_factory.mktemp("eval"), []
    for victim in (2, 1):
        two, before = start(folder / "two"), len(lines(folder / "two"))
        try:
            while len(lines(folder / "two")) == before and two[0].poll() is None is two[1].poll():
                time.sleep(0.01)
            two[victim - 1].send_signal(signal.SIGKILL)
            began = time.monotonic()
            left = two[2 - victim]
            _, errors = left.communicate(timeout=60)
            kills.append((victim, left.returncode, errors, time.monotonic() - began, before, lines(folder / "two")))
        finally:
            for process in two:
                process.kill()
                process.communicate()
    two = start(folder / "two")
    # At the same time, for the two wait for each other much of the time.
    assert cli.main(["eval", "--out", str(folder / "one"), "--methods", METHODS, *WORDS]) == 0
    outputs = [process.communicate(timeout=120) for process in two]
    return {"folder": folder, "kills": kills, "outputs": outputs, "statuses": [process.returncode for process in two]}


def test_the_records_are_those_of_one_process_bit_for_bit(runs):
    assert runs["statuses"] == [0, 0], runs["outputs"]
    assert lines(runs["folder"] / "two") == lines(runs["folder"] / "one") and len(lines(runs["folder"] / "one")) == 12
    one, two = (json.loads((runs["folder"] / name / "run.json").read_text()) for name in ("one", "two"))
    assert one["mesh"] == two["mesh"] == {"data": 2, "model": 2} and one["weights"] == two["weights"]
    assert len(two["resumed"]) == 2
    summaries = [(runs["folder"] / name / "summary.csv").read_bytes() for name in ("one", "two")]
    assert summaries[0] == summaries[1]


def test_one_process_prints(runs):
    (table, _), (nothing, silence) = runs["outputs"]
    assert "snapkv:budget=25%" in table and nothing == ""
    assert "kvjax:" not in silence


def test_a_killed_process_ends_the_other_by_a_named_error_with_the_records_intact(runs):
    for victim, status, errors, seconds, before, records in runs["kills"]:
        assert status != 0 and seconds < 60
        last, name = errors.strip().splitlines()[-1], f"process {victim} of 2"
        assert last.startswith("kvjax: ") and name in last and "was lost" in last, errors
        assert before < len(records) < 12
        # The killed writer may have torn its last line, which the next run drops.
        assert records[:-1] == lines(runs["folder"] / "one")[: len(records) - 1]


def test_a_run_goes_on_under_its_mesh_alone(runs, capsys):
    words = ["eval", "--out", str(runs["folder"] / "one"), "--methods", METHODS, *WORDS]
    assert cli.main([*words, "--mesh", "1x2"]) == 2
    assert "mesh was {'data': 2, 'model': 2} and is now {'data': 1, 'model': 2}" in capsys.readouterr().err
    assert cli.main([*words, "--batch", "3"]) == 2
    assert "axis B of size 3 does not divide" in capsys.readouterr().err
    assert cli.main([*words, "--ray", "local"]) == 2
    assert "leave one of the two out" in capsys.readouterr().err
