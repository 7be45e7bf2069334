"""`kvjax.eval.compare` as a user has it: few arguments, rows that print, plot and convert themselves."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from rich.progress import Progress

import kvjax
from kvjax.errors import KvjaxError
from kvjax.eval import Comparison, EvalRow, Spec, compare
from kvjax.eval.page import summary
from kvjax.eval.run.progress import make_progress
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Ask, Case
from kvjax.method_api import Method, Scorer, make_selection, register_method, token_scores
from kvjax.testing import toy_model
from tests.eval import fake_run


@dataclasses.dataclass(frozen=True)
class ValueNorm(Scorer):
    def scores(self, block, observation, spec):
        return token_scores(jnp.linalg.norm(block.v.astype(jnp.float32), axis=-1), block)


@pytest.fixture(scope="module")
def rows() -> Comparison:
    return Comparison.of(summary.rows(r for r in fake_run.records() if r["method"] in ("full", "kivi:bits=2")))


def test_a_row_has_the_fields_of_the_csv_file():
    assert tuple(field.name for field in dataclasses.fields(EvalRow)) == summary.FIELDS


def test_rows_are_records_and_a_sequence(rows):
    assert isinstance(rows[0], EvalRow) and rows[0].method == "full" == rows[0]["method"]
    assert len(rows) == len(list(rows)) and rows[:2] == Comparison(rows.rows[:2]) and isinstance(rows[:2], Comparison)
    assert rows[-1] in rows and rows == Comparison(rows.rows)
    with pytest.raises(KeyError, match="methods"):
        rows[0]["methods"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows[0].score = 1.0


def test_rows_print_as_the_table_whatever_the_terminal(rows, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    text = str(rows)
    assert text == repr(rows)
    lines = text.splitlines()
    assert any(line.startswith(" kivi:bits=2 ") for line in lines) and "of full" in text and "percent right" in text
    assert max(map(len, lines)) <= 112 and "\x1b" not in text
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(rows) == text  # as text, in a notebook too, where the page below is what is shown
    page = rows._repr_html_()
    assert page.startswith("<table>") and "<td" in page and "kivi:bits=2" in page and "of full" in page


def test_rows_become_dicts_and_json(rows, tmp_path):
    assert rows.to_dicts() == [dataclasses.asdict(row) for row in rows]
    assert json.loads(rows.to_json(tmp_path / "rows.json")) == rows.to_dicts()
    assert json.loads((tmp_path / "rows.json").read_text()) == rows.to_dicts()


def test_rows_plot_themselves(rows, tmp_path, monkeypatch):
    picture = rows.plot(tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG") and picture._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(KvjaxError, match="no row with both a quality and bytes"):
        Comparison(()).plot()
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(KvjaxError, match='plots need altair: pip install "kvjax.eval."'):
        rows.plot()


@pytest.fixture
def small(monkeypatch):
    """A toy model, and the default tasks on a few of its tokens."""
    tokens = np.random.default_rng(0).integers(0, 97, (2, 24))

    def following(model, spec):
        """Tokens that follow others."""
        for i, row in enumerate(tokens):
            yield Case("ppl", f"ppl/{i}", row[:16], follows=row[16:], bytes=8, about={"length": 16})

    def needles(model, spec):
        """Needles."""
        for case in following(model, spec):
            ask = Ask(case.context[:2], "exact", ("x",), 1)
            yield Case("niah", f"niah{case.key}", case.context, asks=(ask,), about={"length": 16})

    monkeypatch.setattr(suite, "makers", lambda: {"niah": needles, "ppl": following})
    monkeypatch.setattr("kvjax.eval.run.harness.answer_text", lambda model, tokens, ask: "x")
    return toy_model(layers=1)


def test_a_model_and_methods_are_enough(small, tmp_path, monkeypatch, capsys, clean_registry):
    @register_method
    def value_norm(budget: int = 256) -> Method:
        return Method(select=make_selection(ValueNorm(), budget))

    monkeypatch.chdir(tmp_path)
    value = Method(select=make_selection(ValueNorm(), 4))
    rows = compare(small, ["full", "value_norm:budget=4 + int4", value])
    assert [(row.method, row.task) for row in rows] == [
        (name, task)
        for name in ("full", "value_norm:budget=4 + int4", kvjax.name_of(value))
        for task in ("niah", "ppl")
    ]
    assert rows[0].device_percent == 100 and rows[2].device_percent < 50 and rows[5].bits != rows[1].bits
    assert list(tmp_path.iterdir()) == []  # nothing is kept
    assert capsys.readouterr() == ("", "")  # nobody watches
    resumed = compare(small, "full", "ppl", Spec(lengths=(16,)), tmp_path / "run")
    assert resumed.to_dicts() == [dataclasses.asdict(rows[1])] and (tmp_path / "run").is_dir()


def test_progress_is_shown_where_it_is_wanted(small, monkeypatch, capsys):
    compare(small, "full", progress=True)
    progress = capsys.readouterr().err
    assert "full: niah" in progress and "100%, " in progress and progress.endswith("\r")
    # The tests run in neither a terminal nor a notebook.
    assert type(make_progress(False)) is type(make_progress(None)) is Progress
    assert make_progress(None).disable
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert not make_progress(None).disable and make_progress(False).disable


def test_the_defaults_are_small():
    defaults = {name: p.default for name, p in inspect.signature(compare).parameters.items()}
    assert defaults["tasks"] == "niah,ppl" and defaults["out"] is None
    assert defaults["spec"].lengths == (512,) and defaults["spec"].contexts <= 4
