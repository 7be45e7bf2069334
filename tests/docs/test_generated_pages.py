"""The pages that scripts write: what they promise of every method is there, and is what code and results say."""

from __future__ import annotations

import itertools
import json
import re

import pytest

import kvjax
from docs.generate import __main__, catalogue, composition, equal_bytes, field, methods, parameters
from docs.generate.catalogue import recipes
from experiments.methods import MEASURED, measured
from kvjax.errors import ComponentConflict, IncompatibleMethod
from kvjax.methods.registry import FAMILIES, recipe
from kvjax.methods.strings import parse_parts
from tests.helpers.documents import FENCE, check_command, commands

NAMES = sorted(recipes())


def blocks(page: str, language: str) -> list[str]:
    """The code of a page's blocks in a language."""
    return [match[3] for match in FENCE.finditer(page) if match[1] == language]


def table_rows(page: str) -> list[list[str]]:
    """The cells of all tables of a page."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_lines_to_copy_that_make_its_method(name):
    page = methods.page(recipes()[name])
    (command,), (code,) = blocks(page, "sh"), blocks(page, "python")
    check_command(*commands(command))
    values: dict = {}
    exec(compile(code, name, "exec", dont_inherit=True), values)
    assert values["method"] == kvjax.parse(recipes()[name].example)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_explains_every_parameter_with_its_default(name):
    page = methods.page(recipes()[name])
    section = page[page.index("## Parameters") : page.index("## What it computes")]
    explained: list[str] = []
    for given, meaning in (cells for cells in table_rows(section) if "`" in cells[0]):
        for text in given.split("<br>"):
            parameter, default, kind = re.fullmatch(r"`(\w+)=([^`]*)` (.+)", text).groups()
            assert default == (str(recipes()[name].parameters[parameter].default) or '""') and kind
            explained.append(parameter)
        assert len(meaning) > 5
    assert sorted(explained) == sorted(recipes()[name].parameters)


def test_a_parameter_that_nothing_explains_is_an_error(clean_catalogue, monkeypatch):
    @recipe("a test")
    def mine(budget: int = 3, mystery: int = 4) -> kvjax.method_api.Method:
        """Does something.

        budget: tokens that stay.
        """
        return kvjax.method_api.Method()

    from kvjax.methods.registry import REGISTRY

    with pytest.raises(LookupError, match="the docstring of mine does not say what 'mystery' means"):
        parameters.describe(REGISTRY["mine"])


def test_a_meaning_is_one_sentence_in_the_words_of_the_method_that_it_refers_to():
    notes, groups = parameters.describe(recipes()["zipvl"])
    theirs = {names: meaning for names, meaning in parameters.describe(recipes()["zipcache"]).groups}
    assert dict(groups)["low", "high"] == theirs["low", "high"]
    notes, groups = parameters.describe(recipes()["int4"])
    assert [names for names, _ in groups] == [("rotate",), ("clip",)] and notes.startswith("Attention in the prompt is")


def test_classes_that_a_docstring_refers_to_are_on_the_page():
    page = methods.page(recipes()["kvcrush"])
    assert "both are explained in `KVCrush`" in page and "### KVCrush" in page
    assert "Representatives by one distance: each unit's bits against one anchor" in page
    assert "### lococo tables" in methods.page(recipes()["lococo"])


def test_pages_do_not_depend_on_what_a_user_has_registered(clean_catalogue):
    before = methods.page(recipes()["snapkv"]), methods.index(), composition.page()

    @recipe("a test")
    def another() -> kvjax.method_api.Method:
        """Does nothing."""
        return kvjax.method_api.Method()

    assert (methods.page(recipes()["snapkv"]), methods.index(), composition.page()) == before


def test_every_method_was_measured_and_is_in_one_family_of_the_menu():
    found = measured()
    assert {r.name for r in recipes().values() if not r.formula} == set()
    assert {r.name for r in recipes().values() if r.example not in found} == set()
    first, *groups = methods.menu()
    assert first == "methods/index.md" and len(groups) == len(FAMILIES)
    entries = [entry for group in groups for members in group.values() for entry in members]
    shown = [path for entry in entries if isinstance(entry, dict) for path in entry.values()]
    assert sorted(shown) == [f"methods/{name}.md" for name in NAMES]
    assert {entry for entry in entries if isinstance(entry, str)} == set(map(catalogue.family_page, FAMILIES))
    assert set(entries[:1] + shown) <= set(methods.pages())


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_a_page_are_those_of_the_results(name):
    page, row = methods.page(recipes()[name]), json.loads(MEASURED.read_text())[recipes()[name].example]
    (line,) = (cells for cells in table_rows(page) if cells[0] == f"`{recipes()[name].example}`" and len(cells) == 8)
    planned = kvjax.planned_bytes(recipes()[name].example, kvjax.load("testbed").config, 2048, dtype="bfloat16")
    assert line[1:4] == [
        f"{planned.fraction_of_full:.1%}",
        f"{planned.host_fraction_of_full:.1%}",
        f"{row['recall']:.1%}",
    ]
    assert "bfloat16" in page and "float32" in page


@pytest.mark.parametrize("name", [name for name in NAMES if name != "full"])
def test_a_page_has_what_a_real_model_did_under_its_method_with_bytes_in_bfloat16(name):
    page, found = methods.page(recipes()[name]), False
    for result in methods.real_results():
        for method in set(result.document["scores"]) - {"full"}:
            device, host = result.document["bfloat16"][method]
            score = result.contexts(method, result.document["tasks"][0])
            row = f"| `{method}` | {device:.1%} | {host:.1%} | {100 * score.mean():.1f} ±"
            in_it = name in [part.name for part in parse_parts(method)]
            assert (row in page) == in_it, method
            found |= in_it
    assert ("## On a real model" in page) == found


@pytest.mark.parametrize(
    ("citation", "link"),
    [
        ("KIVI, arXiv 2402.02750; A2SF, 2407.20485", "https://arxiv.org/abs/2407.20485"),
        ("CaM, ICML, openreview LCTmppB165", "https://openreview.net/forum?id=LCTmppB165"),
    ],
)
def test_citations_link_to_papers(citation, link):
    assert f"({link})" in methods.linked(citation)


def test_text_of_docstrings_is_markdown_that_shows_it():
    assert methods.prose("a * b_c <x>, as in 'snapkv:budget=3 + kvcrush', `k_s`") == (
        r"a \* b\_c &lt;x>, as in `snapkv:budget=3 + kvcrush`, `k_s`"
    )
    assert methods.prose("|v|", in_table=True) == r"\|v\|"


def test_the_table_of_pairs_says_what_composing_says():
    rows = {re.search(r"`(\w+)`", cells[0])[1]: cells[2] for cells in table_rows(composition.page()) if "`" in cells[0]}
    assert sorted(rows) == NAMES
    for a, b in itertools.islice(itertools.combinations(NAMES, 2), 0, None, 40):
        try:
            method = kvjax.compose(a, b)
            refused = False
        except ComponentConflict:
            refused = True
        except IncompatibleMethod:
            continue  # over a selection it may work
        if refused:
            assert f"`{b}`" in rows[a] and f"`{a}`" in rows[b]
        elif method.select is not None and f"`{b}`" not in rows[a]:
            assert f"`{a}`" not in rows[b]


def test_the_survey_is_whole_and_most_of_it_is_here():
    survey = [field.checked(system) for system in field.systems()["survey"]]
    assert [system["number"] for system in survey] == list(range(1, 54))
    assert sum("methods" in system or "calls" in system for system in survey) >= 45
    page = field.page()
    assert all(system["does"] in page for system in survey)


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
        field.checked({"name": "X", **claim})


def test_every_run_has_its_page_and_they_can_be_written_into_a_folder(tmp_path):
    __main__.main([str(tmp_path)])
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert written >= {
        "field.md",
        "composition.md",
        "methods/index.md",
        "families/merging/index.md",
        "methods/merging.md",
    }
    assert written >= {f"{name}.md" for name in equal_bytes.PAGES.values()} and "equal_bytes.png" in written
    assert "- smollm2" not in (tmp_path / "equal_bytes.smollm2.md").read_text()
    assert "SmolLM2-135M" in (tmp_path / "equal_bytes.smollm2.md").read_text()
