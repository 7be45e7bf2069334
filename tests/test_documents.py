"""The code in README and CONTRIBUTING runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvjax
from experiments import field_page, method_pages
from kvjax.methods.catalogue import RECIPES, load_all
from kvjax.testing import toy_model

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
WRITTEN = {
    "value_norm": "value_norm:budget=8 + kvcrush + kivi:bits=4,group=4,residual=4",
    "last_tokens": "last_tokens:recent=6 + offload",
    "half": "half + kcache:n=4",
}


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


@pytest.mark.parametrize(
    "code", [b for page in ("README.md", "CONTRIBUTING.md") for b in blocks(page) if "@recipe" in b]
)
def test_a_method_of_the_documents_generates_alone_and_in_company(code, clean_catalogue):
    before = set(RECIPES)
    exec(compile(code, "document", "exec", dont_inherit=True), {"__name__": "document"})
    (name,) = set(RECIPES) - before
    model, prompts = toy_model(), [list(range(1, 20)), [5, 6, 7]]
    for method in (name, WRITTEN[name]):
        together = kvjax.generate(model, prompts, method, max_new_tokens=4).tokens
        assert together[1] == kvjax.generate(model, prompts[1:], method, max_new_tokens=4).tokens[0]


def test_the_first_steps_of_the_readme(tmp_path):
    (code,) = [b for b in blocks("README.md") if 'kvjax.load("testbed")' in b]
    values = {"long_text": "import os\n" * 40}
    exec(compile(code, "document", "exec", dont_inherit=True), values)
    assert values["out"].tokens_per_second > 0 and values["context"].bytes.total["pinned_host"] > 0


def test_the_pages_of_the_methods_are_those_of_the_code():
    written = {path.name: path.read_text() for path in method_pages.PAGES.glob("*.md")}
    assert written == method_pages.pages(), "run python -m experiments.method_pages"


def test_every_method_has_a_page_with_its_formula_and_its_measurements():
    found = method_pages.measured()
    assert {r.name for r in load_all().values() if not r.formula} == set()
    assert {r.name for r in load_all().values() if r.example not in found} == set()


def test_the_page_of_the_field_is_that_of_its_table_and_of_the_catalogue():
    assert field_page.PAGE.read_text() == field_page.page(), "run python -m experiments.field_page"


def test_the_survey_is_whole_and_most_of_it_is_here():
    survey = [field_page.checked(system) for system in field_page.systems()["survey"]]
    assert [system["number"] for system in survey] == list(range(1, 54))
    assert sum("methods" in system or "calls" in system for system in survey) >= 45


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ({"methods": ["snapkv", "wishful"]}, "X claims the method 'wishful', which the catalogue does not have"),
        ({"calls": ["kvjax.wishful"]}, "X claims kvjax.wishful, which there is not"),
        ({}, "X has neither a method nor a call, nor a reason"),
    ],
)
def test_a_row_that_claims_what_there_is_not_is_an_error(claim, says):
    with pytest.raises(LookupError, match=says):
        field_page.checked({"name": "X", **claim})
