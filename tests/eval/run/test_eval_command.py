"""`kvjax eval` as a user meets it, killed and started again too, on a toy checkpoint with tasks of its own."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax import cli
from kvjax.eval.run import eval_command, harness, store
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Ask, Case
from kvjax.models import checkpoint
from kvjax.testbed import vocab
from kvjax.testing import toy_model

ROOT = Path(__file__).parents[3]
METHODS = "full; snapkv:budget=16,window=4"
TIMES = ("prefill_seconds", "tokens_per_second")


def make_generator(*names):
    return np.random.default_rng([len(n) if isinstance(n, str) else n for n in names])


def asking(model, spec):
    """Questions that are asked of contexts."""
    for n in spec.lengths:
        for i in range(spec.contexts):
            rng, asks = make_generator("asking", spec.seed, n, i), []
            for depth in (0.0, 1.0):
                asks.append(Ask(rng.integers(32, 127, 3), "contains_any", ("a", "e"), 4, about={"depth": depth}))
            yield Case("asking", f"asking/{n}/{i}", rng.integers(32, 127, n - i), tuple(asks), about={"length": n})


def text(model, spec):
    """Text that follows contexts."""
    for n in spec.lengths:
        for i in range(spec.contexts):
            row = make_generator("text", spec.seed, n, i).integers(32, 127, n + 5)
            yield Case("text", f"text/{n}/{i}", row[:n], follows=row[n:], bytes=5, about={"length": n})


def install_stubs(wait=0.0):
    """Replaces all tasks by two small ones, which share one program, and waits `wait` seconds after each batch."""
    suite.makers = lambda: {"asking": asking, "text": text}
    harness.SPEED_TOKENS, harness.SPEED_RUNS = 4, 1
    append = store.Store.append

    def append_and_wait(self, records):
        append(self, records)
        time.sleep(wait)

    store.Store.append = append_and_wait


def run_child(argv, wait):
    """Runs the command in a process of its own, which shares the compiled programs of the tests."""
    jax.config.update("jax_compilation_cache_dir", os.environ["KVJAX_CACHE"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    cli.use_compilation_cache = lambda: None
    eval_command.summarize = write_summary
    install_stubs(wait)
    sys.exit(cli.main(argv))


def write_summary(out):
    """Writes only the CSV file of the summary, which a killed run must not change."""
    from kvjax.eval.page import summary

    summary.write_csv(summary.rows(store.read(out)), out / eval_command.CSV)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    toy = toy_model(layers=1, vocab_size=vocab.SIZE)
    checkpoint.save(folder / "m", toy.config, toy.params, extra_files=vocab.tokenizer_files())
    return str(folder / "m")


@pytest.fixture
def toy(monkeypatch, model):
    """The arguments of a small run in this process."""
    monkeypatch.setenv("KVJAX_CACHE", jax.config.jax_compilation_cache_dir)
    for where, name in ((suite, "makers"), (harness, "SPEED_TOKENS"), (harness, "SPEED_RUNS"), (store.Store, "append")):
        monkeypatch.setattr(where, name, getattr(where, name))
    install_stubs()
    return ["eval", "--model", model, "--tasks", "asking,text", "--contexts", "3", "--batch", "3", "--lengths", "40"]


def start(model, out, wait):
    argv = ["eval", "--model", model, "--methods", METHODS, "--tasks", "asking,text", "--lengths", "40,44"]
    argv += ["--contexts", "6", "--batch", "2", "--out", str(out)]
    code = f"from tests.eval.run.test_eval_command import run_child; run_child({argv!r}, {wait})"
    env = os.environ | {"KVJAX_CACHE": jax.config.jax_compilation_cache_dir, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


def finish(process):
    error = process.communicate()[1]
    assert process.returncode == 0, error


def read_results(out):
    """Reads the records without their times, sorted, and the summary without its times."""
    records = [{k: v for k, v in r.items() if k not in TIMES} for r in store.read(out)]
    with (out / eval_command.CSV).open() as f:
        rows = [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(f)]
    return sorted(records, key=store.record_key), rows


def test_killed_at_random_and_started_again_it_ends_as_an_unbroken_run(tmp_path, model):
    unbroken = start(model, tmp_path / "whole", 0)
    out, rng, kills = tmp_path / "broken", np.random.default_rng(), 0
    out.mkdir()
    path, num_records = out / store.RECORDS, 0
    while kills < 3:
        process, goal = start(model, out, 0.1), num_records + rng.integers(1, 6)
        while process.poll() is None and (path.read_bytes().count(b"\n") if path.exists() else 0) < goal:
            time.sleep(0.01)
        time.sleep(rng.random() / 5)
        assert process.poll() is None, process.communicate()[1]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills, num_records = kills + 1, path.read_bytes().count(b"\n")
        with path.open("ab") as f:  # a kill in the middle of a write leaves a torn line
            f.write(b'{"method": "full", "ta')
    for process in (start(model, out, 0), unbroken):
        finish(process)
    assert read_results(out) == read_results(tmp_path / "whole")
    assert len(store.read(out)) == 2 * 2 * (6 + 6 + 1) and len(store.read_run(out)["resumed"]) == 3


def said(err, start="kvjax: "):
    return [line for line in err.splitlines() if line.startswith(start)]


def test_each_row_is_said_as_soon_as_it_is_finished(toy, tmp_path, capsys, monkeypatch):
    written, append = [], store.Store.append

    def append_and_note(self, records):
        append(self, records)
        written.append((len(self.records), capsys.readouterr().err))

    monkeypatch.setattr(store.Store, "append", append_and_note)
    args = [*toy[:-1], "40,44", "--out", str(tmp_path), "--no-speed", "--methods", METHODS]
    assert cli.main(args) == 0
    # Two methods, and three cases of each task and length in a batch: every batch finishes a row.
    rows = [(number, line) for number, err in written for line in said(err, "kvjax: full at ")]
    assert len(rows) == 4 and rows[0][0] == 3 and "kvjax: full at 40 tokens: asking " in rows[0][1]
    assert rows[0][1].endswith(" percent right, 3 contexts") and "b, 3 contexts" in rows[2][1]
    every = [line for _, err in written for line in said(err, "kvjax: snapkv:budget=16,window=4 at ")]
    assert len(every) == 4 and "text" in every[3] and " ±" in every[3]


def test_a_row_of_several_batches_is_said_after_the_first_one_too(toy, tmp_path, capsys):
    args = [*toy, "--out", str(tmp_path), "--no-speed", "--batch", "2", "--methods", "full"]
    assert cli.main(args) == 0
    of_questions = [line for line in said(capsys.readouterr().err, "kvjax: full at ") if "asking" in line]
    assert [line.rpartition(", ")[2] for line in of_questions] == ["2 contexts so far", "3 contexts"]


def test_a_second_run_says_what_was_there_and_how_to_start_anew(toy, tmp_path, capsys):
    args = [*toy, "--out", str(tmp_path / "run"), "--no-speed"]
    assert cli.main([*args, "--methods", "full"]) == 0
    assert said(capsys.readouterr().err, f"kvjax: {tmp_path / 'run'}") == []
    assert cli.main([*args, "--methods", METHODS]) == 0
    (line,) = said(err := capsys.readouterr().err, f"kvjax: {tmp_path / 'run'}")
    assert "already holds 6 records of full on asking, text at 40 tokens; this run adds to them" in line
    assert "To start anew, choose another folder or delete this one" in line
    assert said(err, "kvjax: full at ") == [] and len(said(err, "kvjax: snapkv")) == 2


def test_a_run_writes_all_its_files_and_grows(toy, tmp_path, capsys):
    args = [*toy, "--out", str(tmp_path), "--no-speed"]
    assert cli.main([*args, "--methods", "full"]) == 0
    assert "full" in capsys.readouterr().out
    assert {"records.jsonl", "run.json", "summary.csv", "report.html"} <= {p.name for p in tmp_path.iterdir()}
    before = (tmp_path / store.RECORDS).read_bytes()
    assert cli.main([*args, "--methods", METHODS]) == 0
    assert (tmp_path / store.RECORDS).read_bytes().startswith(before)
    run = store.read_run(tmp_path)
    assert run["methods"] == ["full", "snapkv:budget=16,window=4"] and run["tasks"] == ["asking", "text"]
    assert run["digest"] == store.digest(toy[2]) and (run["lengths"], run["question_aware"]) == ([40], False)
    assert len(store.read(tmp_path)) == 2 * (3 + 3)
    (tmp_path / "report.html").unlink()
    assert cli.main(["report", str(tmp_path)]) == 0 and (tmp_path / "report.html").is_file()


def test_another_run_in_the_same_place_is_refused(toy, tmp_path, capsys):
    run = {"model": toy[2], "dtype": "float32", "seed": 0, "batch": 3, "question_aware": False}
    (tmp_path / store.RUN).write_text(json.dumps(run))
    more = ["--seed", "1", "--batch", "2", "--question-aware", "--dtype", "bfloat16"]
    assert cli.main([*toy, "--out", str(tmp_path), *more]) == 2
    error = capsys.readouterr().err
    assert "dtype was 'float32' and is now 'bfloat16'; seed was 0 and is now 1; batch was 3 and is now 2; " in error
    assert "question_aware was False and is now True" in error


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--methods", "full; kcach"], "did you mean 'kcache'?"),
        (["--methods", ";"], "no method in ';'"),
        (["--methods", "full, kcache:n=64"], "`;` separates methods"),
        (["--methods", "full + "], "part 2 of 'full +' names no method"),
        (["--tasks", "asking; ppl"], "commas separate its words; write 'asking,ppl'"),
        (["--lengths", "512;1024"], "commas separate its words; write '512,1024'"),
        (["--lengths", "512 1024"], "commas separate its words; write '512,1024'"),
        (["--methods", "kvcrush"], "method 'kvcrush' cannot run on"),
        (["--tasks", "askin"], "did you mean 'asking'?"),
        (["--tasks", ","], "unknown task ''"),
        (["--lengths", "12k"], "a length must be an integer from 1 to 2147483647, got '12k'"),
        (["--lengths", "9" * 5000], "a length must be an integer from 1"),
        (["--lengths", ""], "lengths are one number of tokens or more"),
        (["--contexts", "0"], "contexts must be an integer from 1 to 2147483647, got 0"),
        (["--seed", "-1"], "seed must be an integer from 0"),
        (["--text", "no-such-file"], "cannot read --text no-such-file"),
        (["--batch", "0"], "batch must be an integer from 1"),
        (["--model", "no-such-model"], "there is no checkpoint directory"),
    ],
)
def test_wrong_input_ends_with_one_line_before_anything_runs(toy, tmp_path, capsys, args, says):
    assert cli.main([*toy, "--out", str(tmp_path), *args]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("kvjax: ") and says in error and len(error.splitlines()) == 1
    assert not (tmp_path / store.RUN).exists()


def test_contexts_beyond_the_models_positions_are_warned_of(toy, tmp_path, capsys):
    assert cli.main([*toy, "--out", str(tmp_path), "--lengths", "5000", "--methods", "kvcrush"]) == 2
    assert "5000 tokens are beyond the 4096 positions" in capsys.readouterr().err


def test_the_list_of_tasks(toy, capsys):
    assert cli.main(["eval", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "asking  Questions that are asked of contexts.",
        "text    Text that follows contexts.",
    ]


def test_without_the_libraries_of_the_page_the_table_is_still_written(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "altair" else find_spec(name))
    for name in ("report", "charts"):
        monkeypatch.delitem(sys.modules, f"kvjax.eval.page.{name}", raising=False)
        monkeypatch.delattr(f"kvjax.eval.page.{name}", raising=False)
    earlier_errors = []
    compare = eval_command.compare

    def note_and_compare(*args, **options):
        earlier_errors.append(capsys.readouterr().err)
        return compare(*args, **options)

    monkeypatch.setattr(eval_command, "compare", note_and_compare)
    assert cli.main([*toy, "--out", str(tmp_path), "--no-speed", "--methods", "full"]) == 0
    assert "kvjax: without altair there will be summary.csv and no page; for that: pip install" in earlier_errors[0]
    assert (tmp_path / eval_command.CSV).read_text().count("\n") == 3 and not (tmp_path / "report.html").exists()
    end = capsys.readouterr().err
    assert f'no plots and no page without altair: pip install "kvjax[eval]", then kvjax report {tmp_path}' in end
    assert cli.main(["report", str(tmp_path)]) == 2 and "plots need altair" in capsys.readouterr().err
