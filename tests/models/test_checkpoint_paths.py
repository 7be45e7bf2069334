"""Checkpoints and files in folders of any name: a path is a matter of the file system, and damage one of contents."""

from __future__ import annotations

import functools
import os
import shutil
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

import kvjax
from checkpoints_convert.check import check
from checkpoints_convert.convert import convert
from checkpoints_convert.describe import describe
from kvjax.errors import KvjaxError
from kvjax.models import Config, checkpoint
from kvjax.models.model import random_model
from tests.fixtures import ROOT

ODD_NAMES = [
    *("a\\b", "a\\", "\\a", "a\\\\b", "..\\a", "a\\..\\b", ".\\.", "x.__lock", "x.__lock\\y", os.fsdecode(b"a\xffb")),
    *(
        "a b",
        " a ",
        "a%20b",
        "a#b",
        "a?b",
        "a*b",
        "a|b",
        "a\nb",
        "日本",
        "é",
        "e\u0301",
        "a:b",
        "file:",
        "~",
        "~nobody",
    ),
    *("...", "..a", ".hidden", "-x", "$HOME", "a{b}", "x" * 200, "model.gguf"),
]


@functools.cache
def make_model() -> kvjax.Model:
    return random_model(Config.llama(16, 4, 1, 2, 1, 2, 4))


def assert_is_model(loaded):
    assert loaded.config == make_model().config
    np.testing.assert_array_equal(loaded.params["embedding"], make_model().params["embedding"])


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_a_checkpoint_lies_in_a_folder_of_any_name_and_nowhere_else(tmp_path, name):
    for where in (tmp_path / name, tmp_path / "plain" / name / "inner"):
        checkpoint.save(where, make_model().config, make_model().params)
        checkpoint.save(where, make_model().config, make_model().params, replace=True)
        assert_is_model(kvjax.load(where))
        assert_is_model(kvjax.load(str(where)))
    (tmp_path / name).rename(tmp_path / "moved")
    assert_is_model(kvjax.load(tmp_path / "moved"))
    assert {p.name for p in tmp_path.iterdir()} == {"moved", "plain"}
    assert [p.name for p in (tmp_path / "plain").iterdir()] == [name]


@pytest.mark.parametrize("name", ["..", "a\\b", "x.__lock"])
def test_a_checkpoint_of_version_2_loads_from_such_a_folder(tmp_path, name):
    shutil.copytree(str(resources.files("kvjax") / "testbed"), tmp_path / "inner" / name / "testbed")
    shipped, copied = kvjax.load("testbed"), kvjax.load(tmp_path / "inner" / name / "testbed")
    np.testing.assert_array_equal(copied.params["embedding"], shipped.params["embedding"])


class FolderOfMine:
    """A path object that is no `pathlib.Path`."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return str(self.path)


def test_a_checkpoint_loads_by_every_path_that_leads_to_it(tmp_path, monkeypatch):
    home, work = tmp_path / "home", tmp_path / "work"
    (home / "sub").mkdir(parents=True)
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    checkpoint.save("../home/./model", make_model().config, make_model().params)
    checkpoint.save("~/sub/../second", make_model().config, make_model().params)
    (work / "link").symlink_to(home / "model")
    (work / "deep").symlink_to(home / "sub")
    paths = ["../home/model", "../home/model/", "../home//model", "./../home/sub/../model", "link", "link/", "./link"]
    # `..` after a link leads where the system leads: to the folder above the link's target.
    paths += ["deep/../model", "~/model", "~/second", "~/sub/../model", str(home / "model"), f"{home}/sub/../model/"]
    for path in paths:
        for form in (path, Path(path), FolderOfMine(path)):
            assert_is_model(kvjax.load(form))
    loaded = kvjax.load("link")
    monkeypatch.chdir(tmp_path)
    assert_is_model(loaded)
    with pytest.raises(KvjaxError, match="there is no checkpoint directory link"):
        kvjax.load("link")


def test_a_writer_finishes_where_it_began(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with checkpoint.Writer("out", make_model().config, make_model().dtype) as writer:
        monkeypatch.chdir(tmp_path)
        for name, part in make_model().params.items():
            writer.put(name, part)
    assert_is_model(kvjax.load("a/out"))


@pytest.mark.parametrize("name", ["file", "file/inner", "x" * 300, "absent", "model/kvjax.json"])
def test_what_is_no_folder_is_not_called_damaged(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    checkpoint.save(tmp_path / "model", make_model().config, make_model().params)
    for path in (tmp_path / name, str(tmp_path / name)):
        with pytest.raises(KvjaxError, match="checkpoint") as e:
            kvjax.load(path)
        assert "damaged" not in str(e.value) and "Errno" not in str(e.value)
        assert ("is a file" in str(e.value)) == (name in ("file", "model/kvjax.json"))


@pytest.mark.parametrize("name", ["file", "file/inner", "x" * 300])
def test_where_no_checkpoint_can_be_written_it_says_so_before_the_work(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(KvjaxError, match="cannot write |exists; choose another directory"):
        checkpoint.Writer(tmp_path / name, make_model().config, "float32").__enter__()
    with pytest.raises(KvjaxError, match="cannot write |exists; choose another directory"):
        convert(ROOT / "llama2", tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["a\\b", "a b#%?", "日本", "~"])
def test_the_converter_reads_and_writes_folders_of_any_name(tmp_path, monkeypatch, name):
    shutil.copytree(ROOT / "llama2", tmp_path / name / "source")
    monkeypatch.setenv("HOME", str(tmp_path / name))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for source, out in ((f"../{name}/source", f"../{name}/out"), ("~/source/", Path("~/second/"))):
        convert(source, out)
        assert check(source, out, compare_logits=False).tensors
        assert describe(out)["format"] == "kvjax" and describe(source)["format"] == "Hugging Face"
    assert {p.name for p in (tmp_path / name).iterdir()} == {"source", "out", "second"}
    assert not list((tmp_path / "work").iterdir())


def test_a_file_in_the_place_of_a_source_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(KvjaxError, match="model.safetensors is a file; give the directory that holds config.json"):
        convert(tmp_path / "model.safetensors", tmp_path / "out")
    with pytest.raises(KvjaxError, match="there is no directory .*xxx; give the directory"):
        convert(tmp_path / ("x" * 300), tmp_path / "out")


def test_a_checkpoint_of_kvjax_is_not_converted_again(tmp_path):
    checkpoint.save(tmp_path / "model", make_model().config, make_model().params)
    for read in (lambda x: convert(x, tmp_path / "out"), lambda x: check(x, ROOT / "llama2", compare_logits=False)):
        with pytest.raises(
            KvjaxError, match="is a kvjax checkpoint already; give the directory that holds config.json"
        ):
            read(tmp_path / "model")


@pytest.mark.parametrize("name", ["weights.safetensors", "model-00001-of-00001.safetensors"])
def test_weights_without_their_index_or_under_another_name_are_not_called_absent(tmp_path, name):
    shutil.copytree(ROOT / "llama2", tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").rename(tmp_path / "source" / name)
    with pytest.raises(KvjaxError, match=f"has {name} but .*: copy .*index.json .* or call .* model.safetensors$"):
        convert(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize("name", ["a\\b", "a b#%?.npz", "日本", "~"])
def test_a_context_is_saved_and_resumed_by_any_path(tmp_path, monkeypatch, name):
    context = kvjax.read(make_model(), [[1, 2, 3]], "full", headroom=2)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    for path in (f"../{name}", f"~/{name}", tmp_path / name, f"./{name}"):
        context.save(path)
        assert kvjax.resume(make_model(), path).bytes == context.bytes
        kvjax.cachegen.write(path, context)
        assert kvjax.cachegen.read(make_model(), path).model is make_model()
    assert {p.name for p in tmp_path.iterdir()} == {"sub", name}
    assert [p.name for p in (tmp_path / "sub").iterdir()] == [name]


def test_a_context_that_is_not_there_is_not_called_damaged(tmp_path):
    for path in (tmp_path, tmp_path / "absent", tmp_path / ("x" * 300)):
        for read in (kvjax.resume, kvjax.cachegen.read):
            with pytest.raises(KvjaxError, match="cannot read .*; give the path of a file that was saved"):
                read(make_model(), path)


@pytest.mark.parametrize("path", [None, 5, b"model", ["model"], "a\0b"], ids=repr)
def test_what_is_no_path_is_refused(path, tmp_path):
    context = kvjax.read(make_model(), [[1, 2, 3]], "full", headroom=2)
    calls = [
        lambda: kvjax.load(path),
        lambda: checkpoint.save(path, make_model().config, make_model().params),
        lambda: convert(path, tmp_path / "out"),
        lambda: convert(ROOT / "llama2", path),
        lambda: check(path, tmp_path / "out", compare_logits=False),
        lambda: describe(path),
        lambda: context.save(path),
        lambda: kvjax.resume(make_model(), path),
        lambda: kvjax.cachegen.write(path, context),
    ]
    for call in calls:
        with pytest.raises(KvjaxError, match="is no path; give a text or a pathlib.Path"):
            call()


def test_files_that_may_not_be_read_are_not_called_damaged(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "model", make_model().config, make_model().params)

    def refuse(*args, **more):
        raise ValueError("PERMISSION_DENIED: Error opening local file")

    monkeypatch.setattr("tensorstore.open", refuse)
    with pytest.raises(KvjaxError, match="cannot be read .*PERMISSION_DENIED.*; allow its files to be read$"):
        kvjax.load(tmp_path / "model")
