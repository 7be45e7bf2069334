"""Places that cannot be written, and files made to do harm: one line and status 2, before anything long runs."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re

import jax
import numpy as np
import pytest

import kvjax
from experiments.bench import measuring
from kvjax import KvjaxError, calibrate, cli
from kvjax.generation import archive, save
from kvjax.testing import toy_model
from kvjax.utils.files import check_output, make_folder


@functools.cache
def make_model() -> kvjax.Model:
    return toy_model(layers=1)


@pytest.fixture(autouse=True)
def keep_the_tests_cache(monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", jax.config.jax_compilation_cache_dir)


@pytest.mark.parametrize("name", ["file/out", "a" * 300])
def test_the_demo_says_so_before_it_measures(tmp_path, capsys, name):
    (tmp_path / "file").write_text("mine")
    assert cli.main(["demo", "--out", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvjax: cannot write into --out {tmp_path}") and len(error.splitlines()) == 1
    assert "; give a folder that exists or can be made" in error and "Errno" not in error


def refuse_work(*args, **more):
    raise AssertionError("the work began")


@pytest.mark.parametrize("name", ["file/out", "file/below/out", "x" * 300 + "/out"])
@pytest.mark.parametrize(
    "command",
    [
        "eval --tasks ppl --methods full --lengths 64 --out FOLDER",
        "explore --text TEXT --methods full --out FOLDER/page.html",
        "explore --text TEXT --methods full --out FOLDER",
        "calibrate bases testbed FOLDER --text TEXT",
        "calibrate bases testbed FOLDER/table.safetensors",
        "plan testbed --plot FOLDER/plot.png",
    ],
)
def test_every_command_says_so_before_the_work(tmp_path, monkeypatch, capsys, command, name):
    (tmp_path / "file").write_text("mine")
    for place in ("kvjax.load", "kvjax.explore.explore_command.load", "kvjax.eval.run.eval_command.load"):
        monkeypatch.setattr(place, refuse_work)
    monkeypatch.setattr("kvjax.planning.plan_command.draw", refuse_work)
    words = [w.replace("FOLDER", str(tmp_path / name)).replace("TEXT", str(tmp_path / "file")) for w in command.split()]
    assert cli.main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("kvjax: cannot write") and "; give a" in error and "Errno" not in error


def test_a_file_is_not_written_over_a_folder_nor_with_a_name_that_is_too_long(tmp_path, capsys):
    for out in (tmp_path, tmp_path / ("x" * 300)):
        assert cli.main(["calibrate", "bases", "testbed", str(out)]) == 2
        assert re.search("is a folder; name a file in it|cannot write .*too long", capsys.readouterr().err)


def test_folders_of_results_are_made_and_the_home_directory_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_folder("~/a/b") == tmp_path / "a" / "b" and (tmp_path / "a" / "b").is_dir()
    assert check_output("~/c d/e\\f.json").parent == tmp_path / "c d"
    for option in ("--folder=~/new/results", f"--folder={tmp_path}/other/results"):
        parser = measuring.make_parser("")
        parser.add_argument("--folder", type=measuring.output_folder)
        assert parser.parse_args([option]).folder.is_dir()


@pytest.mark.parametrize("kind", [measuring.output_folder, measuring.output_file])
def test_a_script_refuses_an_impossible_folder_as_it_reads_its_options(tmp_path, capsys, kind):
    (tmp_path / "file").write_text("mine")
    parser = measuring.make_parser("")
    parser.add_argument("--out", type=kind)
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", str(tmp_path / "file" / "below" / "out")])
    assert "error: argument --out: cannot write into" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("bench.aot", ["--topology", "v5e:2x4", "--folder"]),
        ("quality_against_bytes", ["--out"]),
        ("equal_bytes", ["--out"]),
        ("equal_bytes", ["--results"]),
        ("gpu.methods", ["--write"]),
        ("papers.kcache.table2", ["--out"]),
        ("papers.specache.figure4", ["--run"]),
        ("testbed.train", ["--out"]),
    ],
)
def test_scripts_check_their_outputs_before_the_work(tmp_path, monkeypatch, capsys, module, arguments):
    (tmp_path / "file").write_text("mine")
    script = importlib.import_module(f"experiments.{module}")
    monkeypatch.setattr("kvjax.load", refuse_work)
    with pytest.raises(SystemExit):
        script.main([*arguments, str(tmp_path / "file" / "below" / "out")])
    assert f"error: argument {arguments[-1]}: cannot write into {tmp_path}" in capsys.readouterr().err


def test_calibrate_says_so_before_it_counts(tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file" / "out", tmp_path / "none" / "out"):
        with pytest.raises(KvjaxError, match="there is no folder .* to write out into; make it first"):
            calibrate.calibrate(make_model(), "bases", out, [[1, 2]])
    with pytest.raises(KvjaxError, match="too long"):
        calibrate.calibrate(make_model(), "bases", tmp_path / ("a" * 300), [[1, 2, 3, 4]])


def test_a_context_leaves_nothing_where_it_cannot_be_saved(tmp_path, monkeypatch):
    context = kvjax.read(make_model(), [[1, 2, 3]], "full", headroom=8)
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
    path = kvjax.read(make_model(), [[1, 2, 3]], "full", headroom=8).save(tmp_path / "out")
    with np.load(path) as arrays:
        entries = dict(arrays)
    header = json.loads(entries[archive.HEADER].tobytes())
    edited = json.dumps(header | {"capacity": 10**12}).encode()
    with path.open("wb") as file:
        np.savez(file, **entries | {archive.HEADER: np.frombuffer(edited, np.uint8)})
    with pytest.raises(KvjaxError, match="a damaged one .its header is not what was written.; save it again"):
        kvjax.resume(make_model(), path)


@pytest.mark.parametrize("capacity", [None, "8", [8]])
def test_a_saved_context_that_says_nothing_usable_is_refused(tmp_path, capacity):
    path = tmp_path / "out"
    write_header(path, b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises(KvjaxError, match="is no file of the format .*, or a damaged one .*recursion"):
        kvjax.resume(make_model(), path)
    kvjax.read(make_model(), [[1, 2, 3]], "full", headroom=8).save(path)
    with np.load(path) as arrays:
        header = json.loads(arrays[archive.HEADER].tobytes())
    header |= {"capacity": capacity, "arrays": {}}
    write_header(path, json.dumps({k: x for k, x in header.items() if x is not None}).encode())
    with pytest.raises(KvjaxError, match="is no file of the format .*, or a damaged one .*capacity"):
        kvjax.resume(make_model(), path)
    assert set(save.FORMAT.fields) <= header.keys()
