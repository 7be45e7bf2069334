"""Records on disk: the remains of a killed process, what a run may be continued with, and damage, which is named."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.run import store
from tests.eval import fake_run

RUN = {
    "model": "m",
    "digest": "d",
    "weights": "all:w",
    "dtype": "float32",
    "seed": 0,
    "batch": 2,
    "question_aware": False,
    "device": "cpu",
    "methods": ["full"],
    "tasks": ["niah"],
    "lengths": [8],
    "machine": {"jax": "1"},
    "kvjax": "0",
    "started": "now",
}


def record(i, **more):
    return {
        "method": "full",
        "task": "niah",
        "key": f"niah/{i}",
        "scores": [0.5],
        "bytes": {},
        "predictions": ["ä\n\u2028"],
        **more,
    }


def write(directory, *records, **changes):
    with store.open_store(directory, RUN | changes) as s:
        s.append(records)


def test_records_come_back_in_order(tmp_path):
    write(tmp_path, record(0), record(1))
    with store.open_store(tmp_path, RUN) as s:
        assert s.records == [record(0), record(1)] == store.read(tmp_path)
        assert s.find("full", "niah", "niah/1") == record(1) and s.find("full", "niah", "niah/2") is None
        s.append([record(1, scores=[1.0]), record(2)])  # what is done stays as it was
    assert store.read(tmp_path) == [record(0), record(1), record(2)]


def test_records_are_sorted_when_they_are_read_and_not_when_they_are_written(tmp_path):
    order = [
        record(i, method=method, task=task, about={"length": length})
        for method in ("full", "int8")
        for task in ("niah", "ppl", "speed")
        for length in (8, 16)
        for i in range(2 * length, 2 * length + 2)
    ]
    mixed = [order[i] for i in np.random.default_rng(0).permutation(len(order))]
    run = {"methods": ["full", "int8"], "tasks": ["niah", "ppl"]}  # no task of a run is called speed
    write(tmp_path, *mixed[:9], **run)
    write(tmp_path, *mixed[9:], **run)
    assert store.parse_records(tmp_path / store.RECORDS) == mixed
    with store.open_store(tmp_path, RUN | run) as s:
        assert s.records == order == store.read(tmp_path)


TORN = [b"", b'{"method": "full", "task": "ni', b"\0\0\0", b'{"method": "full"}', json.dumps(record(1)).encode()]
"""Last lines that a kill may leave; a line that lacks only its line break is torn, too."""


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_last_line_is_dropped_and_its_case_done_again(tmp_path, torn):
    write(tmp_path, record(0))
    path = tmp_path / store.RECORDS
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert store.read(tmp_path) == [record(0)]
    assert path.read_bytes() == whole + torn  # a reader does not repair what a writer may be writing
    write(tmp_path, record(1))
    assert store.read(tmp_path) == [record(0), record(1)]
    assert path.read_bytes().startswith(whole) and path.read_bytes().count(b"\n") == 2


def test_one_writer_at_a_time(tmp_path):
    with store.open_store(tmp_path, RUN) as s:
        with (
            pytest.raises(KvjaxError, match="another process writes .*wait until it is done"),
            store.open_store(tmp_path, RUN),
        ):
            pass
        s.append([record(0)])
        assert store.read(tmp_path) == [record(0)]  # reading needs no lock
    write(tmp_path, record(1))


def test_run_json_is_written_with_the_first_record(tmp_path):
    with store.open_store(tmp_path, RUN) as s:
        assert not (tmp_path / store.RUN).exists()
        s.append([record(0)])
        assert store.read_run(tmp_path) == RUN
    assert sorted(p.name for p in tmp_path.iterdir()) == [store.RECORDS, store.RUN]


@pytest.mark.parametrize("field", store.CONDITIONS)
def test_another_run_is_not_continued(tmp_path, field):
    write(tmp_path, record(0))
    with pytest.raises(KvjaxError) as e:
        write(tmp_path, record(1), **{field: "other"})
    assert f"{field} was {RUN.get(field)!r} and is now 'other'" in str(e.value) and "another --out" in str(e.value)
    assert store.read(tmp_path) == [record(0)] and store.read_run(tmp_path) == RUN


def test_a_model_from_no_checkpoint_is_known_by_its_name(tmp_path):
    write(tmp_path, record(0), digest=None)
    with pytest.raises(KvjaxError, match="model was 'm' and is now 'n'"):
        write(tmp_path, record(1), digest=None, model="n")


def test_a_run_grows(tmp_path):
    write(tmp_path, record(0))
    write(tmp_path, record(1), methods=["kivi:bits=2", "full"], tasks=["ppl"], lengths=[16], started="later")
    run = store.read_run(tmp_path)
    grown = {"methods": ["full", "kivi:bits=2"], "tasks": ["niah", "ppl"], "lengths": [8, 16]}
    assert run == RUN | grown | {"resumed": [{"at": "later", "kvjax": "0", "machine": {"jax": "1"}}]}


@pytest.mark.parametrize("damage", [None, "{", "[1]", '{"methods": 5}', "[" * 100_000])
def test_a_lost_or_damaged_run_json_is_named(tmp_path, damage):
    with pytest.raises(KvjaxError, match="holds no records.jsonl with records; make them: kvjax eval --out"):
        store.read(tmp_path)
    write(tmp_path, record(0))
    (tmp_path / store.RUN).unlink()
    if damage is not None:
        (tmp_path / store.RUN).write_text(damage)
    with pytest.raises(KvjaxError, match=r"run\.json is missing or damaged .*; copy it again, or choose another --out"):
        write(tmp_path, record(1))
    assert store.read(tmp_path) == [record(0)]


def test_a_number_that_is_none_is_refused_before_anything_is_written(tmp_path):
    says = r"the record of full on niah/1 cannot be written as JSON \(.*\); fix the task or its metric"
    for value in (float("nan"), {1, 2}):
        with pytest.raises(KvjaxError, match=says), store.open_store(tmp_path, RUN) as s:
            s.append([record(0), record(1, bits=value)])
    assert not (tmp_path / store.RECORDS).read_bytes() and not (tmp_path / store.RUN).exists()


def test_the_digest_is_that_of_the_checkpoint():
    assert len(store.digest("testbed")) == 64 and store.digest("random") is None
    json.dumps(store.machine())


ABSENT = object()


def line_error(directory, line) -> str:
    """The error of reading a directory whose second line is this one."""
    (directory / store.RECORDS).write_text("\n".join([json.dumps(record(0)), line, json.dumps(record(2)), ""]))
    with pytest.raises(KvjaxError) as e:
        store.read(directory)
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
        *(({name: ABSENT}, f"has no '{name}'") for name in ("method", "task", "key", "scores", "bytes")),
    ],
)
def test_a_damaged_record_is_named_with_its_line_and_the_remedy(tmp_path, changes, says):
    damaged = {name: value for name, value in (record(1) | changes).items() if value is not ABSENT}
    error = line_error(tmp_path, json.dumps(damaged))
    assert "line 2 of " in error and says in error and "delete that line, and `kvjax eval` does its case again" in error


@pytest.mark.parametrize("line", ["[" * 100_000, "[1]", "{'a': 1}", '"method": 1}'])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    assert "delete that line" in line_error(tmp_path, line)


def test_what_a_run_writes_can_be_read_again(tmp_path):
    lines = [*fake_run.records(["full", "offload"], ["niah", "ppl", "turns.recall"], [512], 2)]
    write(tmp_path, *lines)
    assert sorted(store.read(tmp_path), key=store.record_key) == sorted(lines, key=store.record_key)
    with pytest.raises(KvjaxError, match="the record of full on niah/9 has .* as 'scores'.*fix the task"):
        write(tmp_path, record(9, scores=[2.0]))
    assert len(store.read(tmp_path)) == len(lines)


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    unwritable = pytest.raises(KvjaxError, match="cannot write into .*out .Not a directory.; give a folder")
    with unwritable, store.open_store(tmp_path / "file" / "out", RUN):
        pass
    write(tmp_path, record(0))

    def raise_disk_full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", raise_disk_full)
        with pytest.raises(KvjaxError, match="cannot write .*No space left"):
            write(tmp_path, record(1))
    assert store.read_run(tmp_path) == RUN and sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["file", store.RECORDS, store.RUN]
    )
    write(tmp_path, record(1))
    assert store.read(tmp_path)[0] == record(0)
