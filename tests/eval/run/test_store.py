"""Records on disk: the remains of a killed process, the lock of a writer, and what a run may be continued with."""

from __future__ import annotations

import json

import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.run import store

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


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    write(tmp_path, record(0), record(1))
    path = tmp_path / store.RECORDS
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0], lines[1][5:], ""]))
    with pytest.raises(KvjaxError, match="line 2 of .* is no JSON.*delete that line"):
        write(tmp_path, record(2))


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
    assert f"{field} was {RUN[field]!r} and is now 'other'" in str(e.value) and "another --out" in str(e.value)
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
    with pytest.raises(KvjaxError, match="has no records.jsonl; make it: kvjax eval --out"):
        store.read(tmp_path)
    write(tmp_path, record(0))
    (tmp_path / store.RUN).unlink()
    if damage is not None:
        (tmp_path / store.RUN).write_text(damage)
    with pytest.raises(KvjaxError, match=r"run\.json is missing or damaged .*; copy it again, or choose another --out"):
        write(tmp_path, record(1))
    assert store.read(tmp_path) == [record(0)]


def test_a_number_that_is_none_is_refused_before_anything_is_written(tmp_path):
    says = r"the record of full on niah/1 cannot be written as JSON \(.*\); mend the task or its metric"
    for value in (float("nan"), {1, 2}):
        with pytest.raises(KvjaxError, match=says), store.open_store(tmp_path, RUN) as s:
            s.append([record(0), record(1, bits=value)])
    assert store.read(tmp_path) == [] and not (tmp_path / store.RUN).exists()


def test_the_digest_is_that_of_the_checkpoint():
    assert len(store.digest("testbed")) == 64 and store.digest("random") is None
    json.dumps(store.machine())
