"""A run in parts, put together by `kvjax report`: the same files as one process writes, or a named refusal."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import kvjax
from kvjax import cli
from kvjax.errors import KvjaxError
from kvjax.eval import Spec, compare
from kvjax.eval.run import cells, eval_command, harness, merge, parts, store
from tests.eval.run.test_eval_command import install_stubs, model, toy, write_summary  # noqa: F401
from tests.eval.run.test_parts import slurm

THREE = "full; snapkv:budget=16,window=4; int8"
COUNT = 3
SUMMARIZE = eval_command.summarize


@pytest.fixture(autouse=True)
def outside_of_job_arrays(monkeypatch):
    for name in ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cells, "GROUP_METHODS", 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model):  # noqa: F811
    """A whole run, the same in three parts, and the arguments of both; their speeds are a stand-in's."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for where, name in ((harness, "SPEED_TOKENS"), (harness, "SPEED_RUNS"), (store.Store, "append")):
            patch.setattr(where, name, getattr(where, name))
        patch.setattr("kvjax.eval.tasks.suite.makers", None)
        install_stubs()
        patch.setattr(cells, "GROUP_METHODS", 2)
        patch.setattr(harness, "measure_speed", measure_no_speed)
        args = ["eval", "--model", model, "--methods", THREE, "--tasks", "asking,text", "--lengths", "40,44"]
        args += ["--contexts", "3", "--batch", "2"]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert cli.main([*args, "--out", str(root / "whole")]) == 0
        (root / "whole" / "printed").write_text(printed.getvalue())
        patch.setattr(eval_command, "summarize", None)
        args += ["--out", str(root / "out")]
        for number in range(1, COUNT + 1):
            assert cli.main([*args, "--part", f"{number}/{COUNT}"]) == 0
    return root, args


def measure_no_speed(model, method, length, batch, seed):  # noqa: F811
    """Speed that depends on nothing but the method and the length."""
    size = kvjax.planned_bytes(method, model.config, length, dtype=model.dtype)
    return length / 1000, float(len(str(method)) + length), size


@pytest.fixture
def run(finished, toy, tmp_path, monkeypatch):  # noqa: F811
    """A copy of the whole run and of its parts, and the arguments of a part."""
    monkeypatch.setattr(harness, "measure_speed", measure_no_speed)
    monkeypatch.setattr(eval_command, "summarize", write_summary)
    root, args = finished
    shutil.copytree(root, tmp_path / "runs")
    for description in (tmp_path / "runs").rglob(store.RUN):  # their commands name the folder
        description.write_text(description.read_text().replace(str(root), str(tmp_path / "runs")))
    return tmp_path / "runs", [*args[:-1], str(tmp_path / "runs" / "out")]


def part_folder(root: Path, number: int, count: int = COUNT) -> Path:
    return root / "out" / f"part-{number}-of-{count}"


def read_files(directory: Path) -> tuple[list, str]:
    return store.read(directory), (directory / eval_command.CSV).read_text()


def test_parts_together_are_the_whole_run_bit_for_bit(run, capsys, monkeypatch):
    monkeypatch.setattr(eval_command, "summarize", SUMMARIZE)
    root, _ = run
    whole = [store.record_key(r) for r in store.read(root / "whole")]
    own = [[store.record_key(r) for r in store.read(part_folder(root, n))] for n in range(1, COUNT + 1)]
    assert sorted(key for keys in own for key in keys) == sorted(whole) and min(map(len, own)) >= 5
    assert len(whole) == 3 * (2 * (3 + 3) + 2)
    # Parts are not runs of records that follow one another, so that the reader has an order to find.
    assert [key for keys in own for key in keys] != whole
    table = (root / "whole" / "printed").read_text().partition("wrote")[0]
    assert cli.main(["report", str(root / "out")]) == 0
    printed = capsys.readouterr().out
    assert printed.partition("\n")[2].partition("wrote")[0] == table and "snapkv" in table
    assert read_files(root / "out") == read_files(root / "whole")
    assert {p.name for p in (root / "out" / "plots").iterdir()} == {p.name for p in (root / "whole/plots").iterdir()}
    assert (root / "out" / "report.html").is_file()
    parts_run, whole_run = store.read_run(part_folder(root, 2)), store.read_run(root / "whole")
    assert parts_run.keys() - whole_run.keys() == {"part"} and whole_run.keys() - parts_run.keys() == set()
    assert all(parts_run[name] == whole_run[name] for name in whole_run if name not in ("started", "machine"))
    merged = store.read_run(root / "out")
    assert "part" not in merged and [line.partition(" ")[0] for line in merged["merged"]] == [
        f"part-{n}-of-3" for n in (1, 2, 3)
    ]


def test_folders_in_any_order_and_another_place_merge_too(run):
    root, _ = run
    for n in (1, 2, 3):
        shutil.move(part_folder(root, n), root / f"node{n}")
    folders = [str(root / f"node{n}") for n in (3, 1, 2)]
    assert cli.main(["report", *folders]) == 2  # nothing says where the whole goes
    assert cli.main(["report", *folders, "--out", str(root / "all")]) == 0
    assert read_files(root / "all") == read_files(root / "whole")
    # A copy of a part adds nothing, and is no contradiction.
    shutil.copytree(root / "node2", root / "copy")
    merge.merge([Path(f) for f in folders] + [root / "copy"], root / "again")
    assert store.read(root / "again") == store.read(root / "whole")


def test_a_part_that_was_killed_goes_on(run, capsys, monkeypatch):
    root, args = run
    folder = part_folder(root, 2)
    lines = (folder / store.RECORDS).read_bytes().splitlines(keepends=True)
    # Within a cell, and in the middle of a write.
    (folder / store.RECORDS).write_bytes(b"".join(lines[:3]) + lines[3][:20])
    shutil.rmtree(part_folder(root, 3))
    assert cli.main(["report", str(root / "out")]) == 2
    error = capsys.readouterr().err
    assert f"missing of 3 parts: part 2 ({len(lines) - 3} of {len(lines)} records), part 3. Run them: " in error
    commands = error.partition("Run them: ")[2].strip().split("; kvjax")
    assert [c.rpartition(" --part ")[2] for c in commands] == ["2/3", "3/3"] and "snapkv:budget=16" in error
    assert not (root / "out" / store.RECORDS).exists()
    # What the error says puts it right, word for word.
    for command in error.partition("Run them: ")[2].strip().replace("; kvjax eval", "\nkvjax eval").splitlines():
        words = shlex.split(command)
        assert words[0] == "kvjax" and cli.main(words[1:]) == 0
    assert cli.main(["report", str(root / "out")]) == 0
    assert read_files(root / "out") == read_files(root / "whole")


def test_a_report_of_some_parts_is_asked_for_by_name(run, capsys):
    root, args = run
    shutil.rmtree(part_folder(root, 1))
    assert cli.main(["report", str(root / "out"), "--partial"]) == 0
    assert "kvjax: missing of 3 parts: part 1. Run them: kvjax eval" in capsys.readouterr().err
    some = store.read(root / "out")
    assert 0 < len(some) < len(store.read(root / "whole"))
    # The other part comes later, and the merge is made anew.
    assert cli.main([*args, "--part", "1/3"]) == 0
    assert cli.main(["report", str(root / "out")]) == 0
    assert read_files(root / "out") == read_files(root / "whole")


def test_a_merged_run_goes_on_as_a_whole_one(run, capsys):
    root, args = run
    assert cli.main(["report", str(root / "out")]) == 0
    merged = (root / "out" / store.RECORDS).read_bytes()
    assert cli.main([*args, "--methods", "full; int4", "--no-speed"]) == 0
    grown = (root / "out" / store.RECORDS).read_bytes()
    assert grown.startswith(merged) and grown.count(b"\n") == merged.count(b"\n") + 2 * (3 + 3)
    assert cli.main(["report", str(root / "out")]) == 0
    assert (root / "out" / store.RECORDS).read_bytes() == grown
    assert store.read_run(root / "out")["methods"][-1] == "int4"


def test_runs_of_one_model_merge_without_parts(run):
    root, args = run
    for name, methods in (("a", "full; int8"), ("b", "full; int4")):
        assert cli.main([*args[:-1], str(root / name), "--methods", methods, "--no-speed", "--part", "off"]) == 0
    both = merge.merge([root / "a", root / "b"], root / "both")
    assert store.read_run(both)["methods"] == ["full", "int8", "int4"]
    # The records of `full` are in both, and once in the result.
    one, other = store.read(root / "a"), store.read(root / "b")
    assert store.read(both) == [*one, *(r for r in other if r["method"] == "int4")] and len(one) == len(other) == 24


def change(path: Path, **fields) -> None:
    """Changes fields of a run.json, or of the first record of a records.jsonl."""
    head, end, rest = path.read_text().partition("\n") if path.name == store.RECORDS else (path.read_text(), "", "")
    path.write_text(json.dumps(json.loads(head) | fields) + end + rest)


def test_what_does_not_belong_together_is_refused(run, capsys):
    root, args = run

    def refused(*folders, says, **options):
        with pytest.raises(KvjaxError, match=says):
            merge.merge(folders, **options)
        assert not (root / "out" / store.RECORDS).exists()

    one, two, three = (part_folder(root, n) for n in (1, 2, 3))
    refused(one, two, one, says="part-1-of-3 is given twice")
    refused(root / "out", three, says="part-3-of-3 is given twice")
    refused(one, two, says=r"missing of 3 parts: part 3\. Run them: kvjax report \S+out takes all parts that are there")
    refused(
        one, two, root / "whole", says="whole is a whole run, and .*merge the parts by themselves first", out=root / "x"
    )
    refused(one, root / "nowhere", says="nowhere is no folder", out=root / "x")
    refused(one, two, three, says="whole holds a run of its own, which a merge would replace", out=root / "whole")
    refused(one, two, three, says="is one of the folders to merge", out=two)
    refused(root, says="holds no records.jsonl")

    before = (two / store.RUN).read_bytes()
    for fields, says in (
        ({"dtype": "bfloat16"}, "do not belong together: dtype is 'float32' and 'bfloat16'"),
        ({"seed": 3, "device": "TPU v5e"}, "seed is 0 and 3; device is 'cpu' and 'TPU v5e'"),
        ({"weights": "x"}, "weights is "),
    ):
        change(two / store.RUN, **fields)
        refused(root / "out", says=says)
        (two / store.RUN).write_bytes(before)
    part = json.loads(before)["part"]
    change(two / store.RUN, part=part | {"cells": "other"}, methods=["full", "int2"])
    refused(root / "out", says=r"are parts of different runs: methods are .*int8.* and \['full', 'int2'\]")
    change(two / store.RUN, part=part | {"cases": "other"}, methods=json.loads(before)["methods"])
    refused(root / "out", says=r"parts of different runs: their cases or methods differ \(contexts, text")
    (two / store.RUN).unlink()
    refused(root / "out", says=r"part-2-of-3/run\.json is missing or damaged")
    (two / store.RUN).write_bytes(before)

    shutil.copytree(two, root / "copy")
    change(root / "copy" / store.RECORDS, room={"device": 1})
    refused(one, two, three, root / "copy", says="hold different records of .* on .* [(]room[)]", out=root / "x")
    records = (two / store.RECORDS).read_bytes()
    change(two / store.RECORDS, method_hash="0")
    refused(root / "out", says="method '.*' is not the same in .*part-[12]-of-3 and ")
    (two / store.RECORDS).write_bytes(records)
    (one / parts.CELLS).write_text("{}")
    refused(root / "out", says=r"part-1-of-3/cells\.json is damaged; copy it from another part")
    (one / parts.CELLS).unlink()
    refused(root / "out", says="cells.json is missing")
    shutil.copy(two / parts.CELLS, one)
    merge.merge([root / "out"])
    assert store.read(root / "out") == store.read(root / "whole")


def test_the_job_array_decides_without_a_flag_and_says_so(run, capsys, monkeypatch):
    root, args = run
    for name, value in slurm(7, 3, 3, 11, 4).items():
        monkeypatch.setenv(name, value)
    assert cli.main(args) == 0
    out, err = capsys.readouterr()
    assert re.search(
        r"kvjax: part 2 of 3, by SLURM_ARRAY_TASK_ID=7, one of 3 from 3 to 11, into \S+part-2-of-3; --part", err
    )
    assert re.search(
        r"part 2 of 3 is complete: \d+ records in \S+part-2-of-3\nwhen all parts are: kvjax report \S+out", out
    )
    assert cli.main([*args, "--part", "3/3"]) == 0 and "part 3 of 3 is complete" in capsys.readouterr().out
    # Another array over the same folder, such as one of two tasks that failed, divides the run in another way.
    for name, value in slurm(5, 2, 3, 5, 2).items():
        monkeypatch.setenv(name, value)
    assert cli.main(args) == 2
    assert "holds part-1-of-3, and this is part 2 of 2: give --part N/3, or choose another" in capsys.readouterr().err
    assert cli.main([*args, "--part", "off"]) == 2
    assert "holds part-1-of-3: a run in parts" in capsys.readouterr().err
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    assert cli.main([*args, "--part", "auto"]) == 2
    assert "--part auto finds neither a SLURM array nor a Kubernetes Indexed Job" in capsys.readouterr().err
    assert cli.main([*args, "--out", str(root / "whole"), "--part", "1/3"]) == 2
    assert "whole holds a whole run, and this is part 1 of 3 of one" in capsys.readouterr().err
    assert cli.main([*args, "--part", "4/3"]) == 2 and "there is no part 4/3" in capsys.readouterr().err


def test_a_part_is_continued_by_the_same_run_alone(run, capsys):
    _, args = run
    for more, says in (
        (["--methods", "full; int8"], "methods were ['full', 'snapkv:budget=16,window=4', 'int8'] and are now"),
        (["--contexts", "2"], "its cases or methods have changed (contexts,"),
        (["--seed", "1"], "seed was 0 and is now 1"),
    ):
        assert cli.main([*args, *more, "--part", "1/3"]) == 2
        assert says in capsys.readouterr().err


def test_a_part_without_cells_says_so_and_is_not_missed(run, capsys):
    root, args = run
    few = [*args, "--out", str(root / "few"), "--methods", "full", "--tasks", "text", "--lengths", "40", "--no-speed"]
    complete = []
    for number in range(1, 5):
        assert cli.main([*few, "--part", f"{number}/4"]) == 0
        complete.append(int(re.search(r"complete: (\d+) records?", capsys.readouterr().out)[1]))
    assert sorted(complete) == [0, 0, 1, 2]
    for number, num_records in enumerate(complete, 1):
        if not num_records:
            shutil.rmtree(root / "few" / f"part-{number}-of-4", ignore_errors=True)
    merge.merge([root / "few"])
    assert len(store.read(root / "few")) == 3


def test_from_python_a_part_needs_a_folder(toy, tmp_path):  # noqa: F811
    loaded = kvjax.load(toy[2])
    spec = Spec((40,), contexts=2)
    with pytest.raises(KvjaxError, match=r"part 1 of 2 needs a folder that keeps its answers; give out="):
        compare(loaded, "full", "text", spec, part="1/2")
    rows = [compare(loaded, "full", "text", spec, tmp_path, batch=1, part=f"{n}/2", progress=False) for n in (1, 2)]
    assert [row.contexts for each in rows for row in each] == [1, 1]
    assert len(store.read(merge.merge([tmp_path]))) == 2
