"""The files of docs/clusters.md: they parse, and their commands run all parts where each system says which is which."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from kvjax import cli
from kvjax.eval.run import eval_command
from kvjax.eval.run.comparison import Comparison
from kvjax.eval.run.parts import Part
from kvjax.testing import toy_model
from tests.eval.run.test_parts import slurm
from tests.helpers.documents import code_blocks

NUM_PARTS = 8
BLOCKS = code_blocks("docs/clusters.md")
SBATCH, MERGE = (block.code for block in BLOCKS if block.language == "bash")
JOB, SKY = (yaml.safe_load(block.code) for block in BLOCKS if block.language == "yaml")
(CONTAINER,) = JOB["spec"]["template"]["spec"]["containers"]
# What the scripts call besides kvjax.
STUBS = 'kvjax() { printf "%s\\0" "$@" > "$RECORDED"; }\nsource() { :; }\n'


def run_script(code: str, recorded: Path, **environment: str) -> list[str]:
    """Runs a script by bash, and returns the arguments that it gives to kvjax."""
    recorded.unlink(missing_ok=True)
    environment |= {"PATH": os.environ["PATH"], "HOME": "/home/me", "USER": "me", "RECORDED": str(recorded)}
    subprocess.run(["bash", "-c", STUBS + code], env=environment, check=True)
    return recorded.read_text().split("\0")[:-1]


def list_tasks(system: str, recorded: Path) -> list[tuple[list[str], dict[str, str]]]:
    """The arguments of kvjax and the variables of each task, as the system starts them."""
    if system == "slurm":
        tasks = [slurm(i, NUM_PARTS, 1, NUM_PARTS, 1) for i in range(1, NUM_PARTS + 1)]
        return [(run_script(SBATCH, recorded, **task), task) for task in tasks]
    if system == "kubernetes":
        env = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
        words = [*CONTAINER["command"], *CONTAINER["args"]]
        assert words[0] == "kvjax"
        return [(words[1:], env | {"JOB_COMPLETION_INDEX": str(i)}) for i in range(JOB["spec"]["completions"])]
    nodes = [
        {"SKYPILOT_NODE_RANK": str(i), "SKYPILOT_NUM_NODES": str(SKY["num_nodes"])} for i in range(SKY["num_nodes"])
    ]
    return [(run_script(SKY["run"], recorded, **node), node) for node in nodes]


@pytest.mark.parametrize("system", ["slurm", "kubernetes", "skypilot"])
def test_the_commands_of_a_file_run_every_part_once(system, tmp_path, monkeypatch, capsys):
    asked = []
    model = toy_model(layers=1, max_positions=65_536)
    monkeypatch.setattr(eval_command, "load", lambda name, **options: model)
    monkeypatch.setattr(
        eval_command,
        "compare",
        lambda model, methods, tasks, spec, out, **options: (
            asked.append((options["part"], str(out), spec.lengths)) or Comparison(())
        ),
    )
    for arguments, environment in list_tasks(system, tmp_path / "recorded"):
        with monkeypatch.context() as task:
            for name, value in environment.items():
                task.setenv(name, value)
            assert cli.main(arguments) == 0, capsys.readouterr().err
    assert [part for part, *_ in asked] == [Part(n, NUM_PARTS) for n in range(1, NUM_PARTS + 1)]
    assert {out for _, out, _ in asked} == {asked[0][1]} and asked[0][1].endswith("/out/sweep")
    assert asked[0][2] == (8192, 32768)
    printed = capsys.readouterr()
    assert f"part 8 of 8 is complete: 0 records in {asked[0][1]}/part-8-of-8" in printed.out
    assert ("kvjax: part 3 of 8, by " in printed.err) == (system != "skypilot")
    assert "--part" not in asked[0][0].command and asked[0][0].command.startswith("kvjax eval --model ")


def test_the_scripts_have_no_errors_of_syntax_and_ask_for_what_exists(tmp_path):
    for code in (SBATCH, MERGE, SKY["run"], SKY["setup"]):
        assert subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True).stderr == ""
    options = [shlex.split(line.removeprefix("#SBATCH ")) for line in SBATCH.splitlines() if line.startswith("#SBATCH")]
    assert ["--array=1-8"] in options and SBATCH.startswith("#!/usr/bin/env bash\n#SBATCH")
    for lines in (SBATCH, *(block.code for block in BLOCKS if block.language == "yaml")):
        assert 15 <= len(lines.splitlines()) <= 25
    spec = JOB["spec"]
    assert (spec["completionMode"], str(spec["completions"])) == ("Indexed", CONTAINER["env"][0]["value"])
    mounts = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    # The merge runs after the array, on the folder that the array wrote.
    out = run_script(SBATCH, tmp_path / "recorded", **slurm(1, NUM_PARTS, 1, NUM_PARTS, 1))[-1]
    assert out.replace("/me/", "/$USER/") in MERGE
