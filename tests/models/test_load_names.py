"""`kvjax.load` opens an existing directory before any model of that name."""

from __future__ import annotations

import pathlib

import pytest

import kvjax
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from kvjax.models.model import find_checkpoint, random_model
from tests.models.test_checkpoint import CONFIG

NAMES = ("testbed", "smollm2-135m")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_a_directory_comes_before_the_model_of_its_name(tmp_path, monkeypatch, name, kind):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(name, CONFIG, random_model(CONFIG).params)
    for path in (name, f"./{name}"):
        assert kvjax.load(kind(path)).config == CONFIG
    assert find_checkpoint(name) == pathlib.Path(name)


def test_a_directory_without_a_checkpoint_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "testbed").mkdir()
    assert find_checkpoint("testbed").parent.name == "kvjax"


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_never_a_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for path in (pathlib.Path(name), f"./{name}"):
        with pytest.raises(KvjaxError, match=f"there is no checkpoint directory .*{name}"):
            kvjax.load(path)
    assert kvjax.load("testbed").name == "testbed"


def test_a_broken_template_is_mended_in_the_source_since_a_mended_copy_is_refused(tmp_path):
    params, files = random_model(CONFIG).params, {"chat_template.jinja": b"{{ nothing.at_all }}"}
    checkpoint.save(tmp_path / "model", CONFIG, params, extra_files=files)
    template = kvjax.load(tmp_path / "model").chat_template
    with pytest.raises(KvjaxError, match=r"fix chat_template.jinja .* in the source of the model and convert it again"):
        template.render([[{"role": "user", "content": "a"}]])
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(KvjaxError, match="chat_template.jinja is missing or not what was written"):
        kvjax.load(tmp_path / "model")
