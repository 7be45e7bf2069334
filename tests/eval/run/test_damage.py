"""Runs damaged by a disk or another hand: every damaged line is named, and good records are kept."""

from __future__ import annotations

import argparse
import errno
import gzip
import json
import os
from pathlib import Path

import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.page import report
from kvjax.eval.run import eval_command, store
from kvjax.eval.tasks import data_files
from kvjax.utils import files
from tests.eval import fake_run
from tests.eval.run.test_store import RUN, record, write

DEEP = "[" * 100_000 + "]" * 100_000


def line_error(directory, line) -> str:
    """The error of reading a directory whose second line is this one."""
    (directory / store.RECORDS).write_text("\n".join([json.dumps(record(0)), line, json.dumps(record(2)), ""]))
    with pytest.raises(KvjaxError) as e:
        report.read(directory)
    with pytest.raises(KvjaxError, match="line 2 of "), store.open_store(directory, RUN):
        pass
    return str(e.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scores": ["1"]}, "['1'] as 'scores', which must be numbers from 0 to 1"),
        ({"scores": [1e9]}, "as 'scores'"),
        ({"scores": [-0.1]}, "as 'scores'"),
        ({"scores": [float("nan")]}, "as 'scores'"),
        ({"scores": [float("inf")]}, "as 'scores'"),
        ({"scores": 1}, "1 as 'scores', which must be a list"),
        ({"bytes": None}, "None as 'bytes', which must be a dict"),
        ({"method": ["full"]}, "as 'method', which must be a str"),
        ({"key": None}, "as 'key', which must be a str"),
    ],
)
def test_a_damaged_record_is_named_with_its_line_and_the_remedy(tmp_path, changes, says):
    error = line_error(tmp_path, json.dumps(record(1) | changes))
    assert "line 2 of " in error and says in error and "delete that line, and `kvjax eval` does its case again" in error


@pytest.mark.parametrize("name", ["method", "task", "key", "scores", "bytes"])
def test_a_record_that_lacks_something_is_named(tmp_path, name):
    assert f"has no '{name}'" in line_error(tmp_path, json.dumps({k: v for k, v in record(1).items() if k != name}))


def test_deeply_nested_json_is_named(tmp_path):
    assert "line 2 of" in line_error(tmp_path, DEEP)
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "a"}}\n{DEEP}\n')
    with pytest.raises(KvjaxError, match="rows.jsonl, line 2 is not JSON .*copy the file again"):
        list(data_files.read_json_lines(tmp_path / "rows.jsonl", {"text": str}, "it there"))


def test_bad_bytes_in_local_rows_are_named(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(KvjaxError, match="rows.jsonl, line 1 is not JSON .*utf-8"):
        list(data_files.read_json_lines(tmp_path / "rows.jsonl", {"text": str}, "it there"))
    packed = gzip.compress(json.dumps({"text": "a" * 1000}).encode())
    for damaged in (packed[:-9], b"no gzip"):
        (tmp_path / "rows.jsonl.gz").write_bytes(damaged)
        with pytest.raises(KvjaxError, match="rows.jsonl.gz is damaged .*copy it again"):
            list(data_files.read_json_lines(tmp_path / "rows.jsonl.gz", {"text": str}, "it there"))


def test_what_a_run_writes_can_be_read_again(tmp_path):
    lines = [*fake_run.records(["full", "offload"], ["niah", "ppl", "turns.recall"], [512], 2)]
    write(tmp_path, *lines)
    assert store.read(tmp_path) == lines
    with pytest.raises(KvjaxError, match="the record of full on niah/9 has .* as 'scores'.*mend the task"):
        write(tmp_path, record(9, scores=[2.0]))
    assert store.read(tmp_path) == lines


def test_the_report_says_what_to_do_without_run_json(tmp_path, capsys):
    write(tmp_path, record(0, about={"length": 4}))
    (tmp_path / store.RUN).unlink()
    eval_command.render(tmp_path)
    error = capsys.readouterr().err
    assert "has records but no run.json" in error and "copy it again" in error
    (tmp_path / store.RUN).write_text("{")
    with pytest.raises(KvjaxError, match="run.json is missing or damaged .*copy it again"):
        eval_command.render(tmp_path)


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError), store.open_store(tmp_path / "file" / "out", RUN):
        pass
    write(tmp_path, record(0))

    def raise_disk_full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", raise_disk_full)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, record(1))
    assert store.read_run(tmp_path) == RUN and sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["file", store.RECORDS, store.RUN]
    )
    write(tmp_path, record(1))
    assert store.read(tmp_path)[0] == record(0)


def test_a_page_that_does_not_fit_on_the_disk_leaves_the_one_of_before(tmp_path, monkeypatch):
    directory = fake_run.write(tmp_path, methods=["full"], tasks=["niah"], lengths=[512], cases=1)
    before = report.write(directory).read_bytes()

    def raise_disk_full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", raise_disk_full)
    with pytest.raises(KvjaxError, match=r"cannot write .*report\.html \(No space left on device\)"):
        report.write(directory)
    assert (directory / report.PAGE).read_bytes() == before and not list(directory.glob("*.partial"))


def test_a_page_goes_through_links_and_pipes(tmp_path):
    (tmp_path / "target").write_text("before")
    (tmp_path / "link").symlink_to("target")
    files.write_text(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "after"
    assert files.write_text(Path(os.devnull), "gone").is_char_device()


def test_a_negative_seed_is_refused_before_anything_runs():
    more = {"lengths": "8", "text": None, "data": None, "chat": None}
    args = argparse.Namespace(contexts=1, questions=1, depths=1, batch=1, seed=-1, **more)
    with pytest.raises(KvjaxError, match="--seed must be at least 0, got -1"):
        eval_command.make_spec(args)
