"""Places that cannot be written, and files made to do harm: one line and status 2, before anything long runs."""

from __future__ import annotations

import hashlib
import json

import jax
import numpy as np
import pytest

import kvjax
from kvjax import KvjaxError, calibrate, cli
from kvjax.generation import archive, save
from kvjax.testing import toy_model

MODEL = toy_model(layers=1)


@pytest.fixture(autouse=True)
def keep_the_tests_cache(monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", jax.config.jax_compilation_cache_dir)


@pytest.mark.parametrize("name", ["file/out", "a" * 300])
def test_the_demo_says_so_before_it_measures(tmp_path, capsys, name):
    (tmp_path / "file").write_text("mine")
    assert cli.main(["demo", "--out", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvjax: [Errno ") and len(error.splitlines()) == 1


def test_calibrate_says_so_before_it_counts(tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "out", tmp_path / "none" / "out"):
        with pytest.raises(KvjaxError, match="there is no folder .* to write out into; make it first"):
            calibrate.calibrate(MODEL, "bases", out, [[1, 2]])
    with pytest.raises(KvjaxError, match="too long"):
        calibrate.calibrate(MODEL, "bases", tmp_path / ("a" * 300), [[1, 2, 3, 4]])


def test_a_context_leaves_nothing_where_it_cannot_be_saved(tmp_path, monkeypatch):
    context = kvjax.read(MODEL, [[1, 2, 3]], "full", room=8)
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "out", tmp_path / ("a" * 300), tmp_path / "none" / "out"):
        with pytest.raises(KvjaxError, match="cannot write"):
            context.save(out)

    def raise_disk_full(file, **arrays):
        file.write(b"the beginning")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", raise_disk_full)
    with pytest.raises(KvjaxError, match="cannot write .*no space left"):
        context.save(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def write_header(path, header, seal=None):
    seal = hashlib.sha256(header).digest() if seal is None else seal
    with path.open("wb") as file:
        arrays = {archive.HEADER: header, archive.SEAL: seal}
        np.savez(file, **{name: np.frombuffer(x, np.uint8) for name, x in arrays.items()})


def test_a_saved_context_whose_header_was_edited_is_refused(tmp_path):
    path = kvjax.read(MODEL, [[1, 2, 3]], "full", room=8).save(tmp_path / "out")
    with np.load(path) as arrays:
        entries = dict(arrays)
    header = json.loads(entries[archive.HEADER].tobytes())
    edited = json.dumps(header | {"capacity": 10**12}).encode()
    with path.open("wb") as file:
        np.savez(file, **entries | {archive.HEADER: np.frombuffer(edited, np.uint8)})
    with pytest.raises(KvjaxError, match="a damaged one .its header is not what was written.; save it again"):
        kvjax.resume(MODEL, path)


@pytest.mark.parametrize("capacity", [None, "8", [8]])
def test_a_saved_context_that_says_nothing_usable_is_refused(tmp_path, capacity):
    path = tmp_path / "out"
    write_header(path, b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises(KvjaxError, match="is no file of the format .*, or a damaged one .*recursion"):
        kvjax.resume(MODEL, path)
    kvjax.read(MODEL, [[1, 2, 3]], "full", room=8).save(path)
    with np.load(path) as arrays:
        header = json.loads(arrays[archive.HEADER].tobytes())
    header |= {"capacity": capacity, "arrays": {}}
    write_header(path, json.dumps({k: x for k, x in header.items() if x is not None}).encode())
    with pytest.raises(KvjaxError, match="is no file of the format .*, or a damaged one .*capacity"):
        kvjax.resume(MODEL, path)
    assert set(save.FORMAT.fields) <= header.keys()
