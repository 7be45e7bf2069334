"""Tables are read from files as they were written, and a table that does not fit is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.cache.calibration import table_file
from kvjax.cache.calibration.table_file import TableFile
from kvjax.errors import KvjaxError
from kvjax.methods.lukv import BudgetCurves
from kvjax.methods.qfilters import QFilters
from tests.contract import layer

SPEC = dataclasses.replace(layer.spec(), num_layers=2, method_layers=None)


@pytest.fixture
def path(tmp_path):
    rows = [{"weights": np.full((layer.K,), i + 0.5, np.float32)} for i in range(2)]
    return str(table_file.write(tmp_path / "heads.safetensors", "heads", SPEC, rows, "a test"))


def test_each_layer_finds_its_own_arrays(path):
    second = dataclasses.replace(SPEC, index=1)
    for spec, expected in ((SPEC, 0.5), (second, 1.5)):
        arrays = TableFile(path, "heads").layer_arrays(spec, weights=(layer.K,))
        np.testing.assert_array_equal(arrays["weights"], [expected] * layer.K)
        assert TableFile(path, "heads").layer_arrays(spec, weights=(None,))


def test_equal_content_is_an_equal_table_wherever_it_lies(path, tmp_path):
    copy, other = tmp_path / "copy", tmp_path / "other"
    copy.write_bytes(Path(path).read_bytes())
    table_file.write(other, "heads", SPEC, [{"weights": np.zeros(layer.K, np.float32)}] * 2)
    assert TableFile(str(copy), "heads") == TableFile(path, "heads") and hash(TableFile(str(copy), "heads"))
    assert TableFile(str(other), "heads") != TableFile(path, "heads") != TableFile(path, "bases")


def test_tables_of_ones_own_come_before_those_that_ship(tmp_path, monkeypatch):
    def write(folder, name, number, spec=SPEC):
        (tmp_path / folder / "heads").mkdir(parents=True, exist_ok=True)
        rows = [{"weights": np.full(layer.K, number, np.float32)}] * 2
        table_file.write(tmp_path / folder / "heads" / f"{name}.safetensors", "heads", spec, rows)

    def read():
        return TableFile("shipped", "heads").layer_arrays(SPEC, weights=(layer.K,))["weights"][0]

    monkeypatch.setattr(table_file, "SHIPPED_TABLES", tmp_path / "shipped")
    write("shipped", "a", 1.0)
    write("own", "of_another_model", 2.0, dataclasses.replace(SPEC, head_dim=64))
    shipped = TableFile("shipped", "heads")
    assert read() == 1.0
    monkeypatch.setenv("KVJAX_TABLES", str(tmp_path / "own"))
    assert read() == 1.0
    write("own", "b", 3.0)
    assert read() == 3.0 and TableFile("shipped", "heads") != shipped
    (tmp_path / "own" / "bases").mkdir()
    (tmp_path / "own" / "bases" / "heads.safetensors").write_bytes(
        (tmp_path / "own" / "heads" / "b.safetensors").read_bytes()
    )
    with pytest.raises(KvjaxError, match="ships no table of bases .* or put it into the folder bases of KVJAX_TABLES"):
        TableFile("shipped", "bases").layer_arrays(SPEC)
    write("own", "c", 4.0)
    with pytest.raises(KvjaxError, match="b.safetensors and c.safetensors fit a model of this shape both; give"):
        read()
    monkeypatch.setenv("KVJAX_TABLES", str(tmp_path / "none"))
    with pytest.raises(KvjaxError, match="KVJAX_TABLES names .*none, and there is no such folder; make it"):
        read()


@pytest.mark.parametrize(
    ("kind", "spec", "shapes", "says"),
    [
        ("bases", SPEC, {}, "is a table of heads, and one of bases is needed"),
        (
            "heads",
            dataclasses.replace(SPEC, head_dim=64),
            {},
            "head_dim=32, and this one has head_dim=64; make a table",
        ),
        (
            "heads",
            dataclasses.replace(SPEC, num_layers=3, method_layers=None),
            {},
            "layers=2, and this one has layers=3",
        ),
        ("heads", SPEC, {"bases": (2,)}, "has no array `0.bases`; make the table anew"),
        ("heads", SPEC, {"weights": (5,)}, r"`0.weights` of .* has shape \(2,\), expected \(5\)"),
        ("heads", SPEC, {"weights": (2, None)}, r"expected \(2, any\)"),
    ],
)
def test_a_table_that_does_not_fit_says_why(path, kind, spec, shapes, says):
    with pytest.raises(KvjaxError, match=says):
        TableFile(path, kind).layer_arrays(spec, **shapes)


def test_what_is_no_table_says_so(tmp_path):
    with pytest.raises(KvjaxError, match="no table of heads can be read from .*No such file.*kvjax calibrate heads"):
        TableFile(str(tmp_path / "none"), "heads")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(KvjaxError, match=r"is no safetensors file .*; give what `kvjax calibrate` made"):
        TableFile(str(tmp_path / "text"), "heads").layer_arrays(SPEC)
    with pytest.raises(KvjaxError, match="1 sets of arrays for 2 layers"):
        table_file.write(tmp_path / "few", "heads", SPEC, [{}])
    bad = table_file.write(tmp_path / "bad", "heads", SPEC, [{"weights": np.array([1, np.nan], np.float32)}] * 2)
    with pytest.raises(KvjaxError, match="not finite"):
        TableFile(str(bad), "heads").layer_arrays(SPEC, weights=(2,))


def test_a_published_file_is_read_in_the_form_that_its_authors_gave_it(tmp_path):
    """As Hugging Face's classes save it, here in bfloat16, with a format of their own in the metadata."""
    filters = np.arange(2 * layer.K * layer.H).reshape(2, layer.K, layer.H).astype(ml_dtypes.bfloat16)
    save_file({"q_filters": filters}, tmp_path / "model.safetensors", {"format": "pt"})
    table = QFilters.table_file(str(tmp_path / "model.safetensors"))
    for index in range(2):
        spec = dataclasses.replace(SPEC, index=index)
        for bound in (table, table.at(spec)):
            found = bound.layer_arrays(spec, filter=(layer.K, layer.H))["filter"]
            np.testing.assert_array_equal(found, filters[index].astype(np.float32))
    with pytest.raises(KvjaxError, match="is a table of none that kvjax knows, and one of heads is needed"):
        TableFile(table.path, "heads").layer_arrays(SPEC)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "q_filter",
            np.zeros(3),
            "has no array `q_filters`, and begins with q_filter; give what `kvjax calibrate` made",
        ),
        (
            "q_filters",
            np.zeros((3, 2, 32)),
            r"`q_filters` of .* shape \(3, 2, 32\), and this model needs \(2, 2, 32\); give",
        ),
        ("q_filters", np.full((2, 2, 32), np.nan), "`0.filter` of .* holds a number that is not finite"),
    ],
)
def test_a_published_file_that_does_not_fit_says_why(tmp_path, name, content, says):
    save_file({name: content}, tmp_path / "file")
    with pytest.raises(KvjaxError, match=says):
        QFilters.table_file(str(tmp_path / "file")).layer_arrays(SPEC, filter=(None, None))


def test_pickles_and_objects_are_not_opened(tmp_path):
    (tmp_path / "gates.pt").write_bytes(b"anything")
    with pytest.raises(
        KvjaxError, match="is a pickle, which can run any code .* write its arrays with safetensors.torch"
    ):
        QFilters.table_file(str(tmp_path / "gates.pt")).layer_arrays(SPEC)
    np.save(tmp_path / "curves.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(KvjaxError, match="is no safetensors file that can be read .*Object arrays cannot be loaded"):
        BudgetCurves.table_file(str(tmp_path / "curves.npy")).layer_arrays(SPEC)
