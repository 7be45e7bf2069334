"""A method is one file: the registry reads its docstring, and everything else finds it there."""

from __future__ import annotations

import sys

import jax
import lazy_loader
import numpy as np
import pytest

import kvjax
from docs.generate import entries, methods, pairs
from kvjax import KvjaxError, cli
from kvjax.method_api import Method, load_methods, register_method
from kvjax.registry.docstrings import parse_docstring
from kvjax.registry.loading import load_all
from kvjax.registry.registration import REGISTRY, import_builtin_methods
from kvjax.testing import check_method, toy_model
from tests.contract import test_contract
from tests.contract.cases import selection_bytes
from tests.contract.method_case import sized_case

VALUE_NORM = '''
"""Value norm: keeps the tokens with the largest values."""

import dataclasses

import jax.numpy as jnp

from kvjax.method_api import Method, Scorer, TokenBudget, make_selection, register_method, token_scores


@dataclasses.dataclass(frozen=True)
class ValueNorm(Scorer):
    """Scores a token by the norm of its value."""

    def scores(self, block, observation, spec):
        return token_scores(jnp.linalg.norm(block.v.astype(jnp.float32), axis=-1), block)


@register_method(example="value_norm:budget=512", family="eviction after the prompt")
def value_norm(budget: TokenBudget = 256, sinks: int = 0) -> Method:
    """Keeps the prompt tokens with the largest values.

    It needs no queries.

    Formula:
      score_s = |v_s|

    Differs:
      None; it is an example.

    Args:
      budget, sinks: as in `make_selection`.

    Reference:
      an idea of mine, arXiv 2401.00001
    """
    return Method(select=make_selection(ValueNorm(), budget, sinks))
'''


@pytest.fixture
def in_kvjax(tmp_path, monkeypatch, clean_registry):
    """Puts the file into a folder that counts as a part of kvjax/methods."""
    (tmp_path / "value_norm.py").write_text(VALUE_NORM)
    monkeypatch.setattr(kvjax.methods, "__path__", [*kvjax.methods.__path__, str(tmp_path)])
    # As the package does when it is imported with that file in its folder.
    names = {name: [name] for name in (*dir(kvjax.methods), "value_norm")}
    attached = lazy_loader.attach("kvjax.methods", submod_attrs=names)
    for name, value in zip(("__getattr__", "__dir__", "__all__"), attached, strict=True):
        monkeypatch.setattr(kvjax.methods, name, value)
    import_builtin_methods.cache_clear()
    yield
    vars(kvjax.methods).pop("value_norm", None)
    sys.modules.pop("kvjax.methods.value_norm", None)


def test_a_file_of_a_users_is_on_the_command_line_and_can_be_checked(tmp_path, monkeypatch, capsys, clean_registry):
    monkeypatch.setenv("KVJAX_CACHE", jax.config.jax_compilation_cache_dir)
    path = tmp_path / "my_method.py"
    path.write_text(VALUE_NORM)
    assert cli.main(["methods", "value_norm", "--load", str(path)]) == 0
    output = capsys.readouterr().out
    assert "    Keeps the prompt tokens with the largest values.\n    It needs no queries.\n" in output
    assert "reference: an idea of mine" in output and "formula: score_s = |v_s|" in output
    assert "  budget: Prompt tokens kept per layer and key/value head, sinks" in output
    assert load_methods(path) == ("value_norm",) and REGISTRY["value_norm"].docs.reference.startswith("an idea")
    model = toy_model(layers=2)
    assert check_method("value_norm:budget=24", model) and check_method("value_norm:budget=24 + int8", model)
    assert "value_norm" not in entries.builtin_entries()  # the site does not show what a user has loaded


def test_a_file_in_the_folder_of_methods_is_found_by_everything(in_kvjax, capsys):
    entry = load_all()["value_norm"]
    assert kvjax.methods.value_norm(budget=4) == kvjax.parse("value_norm:budget=4")
    assert cli.main(["methods"]) == 0
    assert "\n  value_norm " in capsys.readouterr().out
    members = [member.name for member in entries.entries_by_family()["eviction after the prompt"]]
    assert "value_norm" in members and "value_norm" in methods.index_page()
    page = methods.page(entry)
    assert "| `budget=256` int or `25%` | Prompt tokens kept per layer" in page and "arxiv.org/abs/2401.00001" in page
    assert "Not yet measured: `value_norm:budget=512`" in page
    assert pairs.judge_pair("value_norm", "kivi").composes and not pairs.judge_pair("value_norm", "snapkv").composes


def test_a_line_of_cases_puts_a_method_into_the_battery(in_kvjax):
    load_all()
    case = sized_case("value_norm", "value_norm:budget={}", 5, 100, selection_bytes(5))
    test_contract.test_c1_at_its_limit_it_is_dense_attention_in_a_window(case)
    test_contract.test_c6_bytes_are_the_papers_and_the_planned_ones(case, np.float32)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            "Formula:",
            "Formulas:",
            "the docstring of value_norm has no formula; a method of kvjax has a summary and the",
        ),
        ("    Differs:\n      None; it is an example.\n", "", "has no differs"),
        ("      an idea of mine, arXiv 2401.00001\n", "", "has no reference"),
        ("budget, sinks:", "budget:", "`Args:` of value_norm must describe each parameter and no other; correct sinks"),
        ("budget, sinks:", "budget, sinks, recent:", "must describe each parameter and no other; correct recent"),
    ],
)
def test_a_method_of_kvjax_has_a_complete_docstring(in_kvjax, tmp_path, before, after, says):
    assert before in VALUE_NORM
    (tmp_path / "value_norm.py").write_text(VALUE_NORM.replace(before, after))
    with pytest.raises(KvjaxError, match=says):
        load_all()


def test_a_reference_to_a_parameter_that_is_not_described_is_an_error(clean_registry):
    @register_method
    def own_method(budget: int = 3, mystery: int = 4) -> Method:
        """Does something.

        Args:
          budget: as in `snapkv`.
          mystery: as in `snapkv`.
        """
        return Method()

    with pytest.raises(KvjaxError, match="`Args:` refers to `snapkv` for mystery, which is not described there"):
        _ = REGISTRY["own_method"].meanings


def test_a_docstring_is_parsed_by_its_sections():
    docs = parse_docstring(
        """Does one thing.

        And then
        another.

        See: this is no section.

        Args:
          a, b: first
            and second: with a colon.
          c: third.

        Returns:
          A method.

        Reference:
          a paper,
          2024
        """
    )
    assert docs.summary == "Does one thing."
    assert docs.description == "And then another.\n\nSee: this is no section."
    assert docs.args == {"a": "first and second: with a colon.", "b": "first and second: with a colon.", "c": "third."}
    assert (docs.formula, docs.differs, docs.reference) == ("", "", "a paper, 2024")
