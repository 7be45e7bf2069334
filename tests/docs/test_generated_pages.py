"""The generated pages: every method has what they promise, and it agrees with the code and the results."""

from __future__ import annotations

import functools
import itertools
import json
import re

import pytest

import kvjax
from docs.generate import __main__, composition, entries, equal_bytes, field, methods
from docs.generate.entries import builtin_entries
from experiments.methods import RESULTS, read_results
from kvjax.errors import ComponentConflict, IncompatibleMethod
from kvjax.registry.registration import FAMILIES, register_method
from kvjax.registry.strings import parse_parts
from tests.helpers.documents import FENCE, check_command, commands

NAMES = sorted(builtin_entries())


@functools.cache
def page_of(name: str) -> str:
    """The page of a method of kvjax, made once for all tests."""
    return methods.page(builtin_entries()[name])


def blocks(page: str, language: str) -> list[str]:
    """The code of a page's blocks in a language."""
    return [match["code"] for match in FENCE.finditer(page) if match["language"] == language]


def table_rows(page: str) -> list[list[str]]:
    """The cells of all tables of a page."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_page_has_lines_to_copy_that_make_its_method():
    for name, entry in builtin_entries().items():
        page = page_of(name)
        (command,), (code,) = blocks(page, "sh"), blocks(page, "python")
        check_command(*commands(command))
        values: dict = {}
        exec(compile(code, name, "exec", dont_inherit=True), values)
        assert values["method"] == kvjax.parse(entry.example), name


def test_every_page_explains_every_parameter_with_its_default():
    for entry in builtin_entries().values():
        page = page_of(entry.name)
        section = page[page.index("## Parameters") : page.index("## What it computes")]
        explained: list[str] = []
        for names, meaning in (cells for cells in table_rows(section) if "`" in cells[0]):
            for text in names.split("<br>"):
                parameter, default, kind = re.fullmatch(r"`(\w+)=([^`]*)` (.+)", text).groups()
                assert default == (str(entry.parameters[parameter].default) or '""') and kind
                explained.append(parameter)
            assert len(meaning) > 5
        assert sorted(explained) == sorted(entry.parameters), entry.example


def test_a_meaning_is_in_the_words_of_the_method_that_the_docstring_refers_to():
    zipvl, zipcache = (builtin_entries()[name].meanings for name in ("zipvl", "zipcache"))
    assert zipvl["low"] == zipcache["low"] == "Bits of the least salient tokens (the public code: 2)."
    assert zipvl["high"] == zipcache["high"] == "Bits of the other tokens (the public code: 4)."
    snapkv = builtin_entries()["snapkv"].meanings
    assert snapkv["budget"].endswith("; the window is included.")


def test_parameters_and_the_description_of_a_docstring_are_told_apart():
    int4 = builtin_entries()["int4"]
    assert list(int4.meanings) == ["rotate", "clip"]
    assert int4.docs.description.startswith("Attention in the prompt is") and int4.docs.description in methods.page(
        int4
    )


def test_classes_that_a_docstring_refers_to_are_on_the_page():
    page = page_of("kvcrush")
    assert "see `KVCrush`" in page and "### KVCrush" in page
    assert "Chooses representatives by the Hamming distance of each unit's signature to one anchor" in page
    assert "### lococo tables" in page_of("lococo")


def test_pages_do_not_depend_on_what_a_user_has_registered(clean_registry):
    before = methods.page(builtin_entries()["snapkv"]), methods.index_page(), composition.page()

    @register_method
    def another() -> kvjax.method_api.Method:
        """Does nothing."""
        return kvjax.method_api.Method()

    assert (methods.page(builtin_entries()["snapkv"]), methods.index_page(), composition.page()) == before


def test_methods_were_measured_and_each_is_in_one_family_of_the_menu():
    results = read_results()
    assert {e.name for e in builtin_entries().values() if not e.docs.formula} == set()
    # A method that was just added has a page before it has numbers; those of all others must stay.
    assert sum(entry.example in results for entry in builtin_entries().values()) >= 73
    first, *groups = methods.menu()
    assert first == "methods/index.md" and len(groups) == len(FAMILIES)
    items = [item for group in groups for members in group.values() for item in members]
    menu_pages = [path for entry in items if isinstance(entry, dict) for path in entry.values()]
    assert sorted(menu_pages) == [f"methods/{name}.md" for name in NAMES]
    assert {item for item in items if isinstance(item, str)} == set(map(entries.family_path, FAMILIES))
    assert set(items[:1] + menu_pages) <= set(methods.pages())


def test_the_numbers_of_every_page_are_those_of_the_results():
    measured, config = json.loads(RESULTS.read_text()), kvjax.load("testbed").config
    for entry in builtin_entries().values():
        page, row = page_of(entry.name), measured.get(entry.example)
        if row is None:
            assert f"Not yet measured: `{entry.example}`." in page
            continue
        (line,) = (cells for cells in table_rows(page) if cells[0] == f"`{entry.example}`" and len(cells) == 8)
        planned = kvjax.planned_bytes(entry.example, config, 2048, dtype="bfloat16")
        numbers = (planned.fraction_of_full, planned.host_fraction_of_full, row["recall"])
        assert line[1:4] == [f"{fraction:.1%}" for fraction in numbers], entry.example
        assert line[6:] == [f"{planned.held[kind] / 1024:,.0f}" for kind in ("device", "pinned_host")]
        assert "| device KiB, bfloat16 | host KiB, bfloat16 |" in page and "KiB, float32" not in page


def test_every_page_has_what_a_real_model_did_under_its_method_with_bytes_in_bfloat16():
    for name in set(NAMES) - {"full"}:
        page, has_row, shown = page_of(name), False, set()
        for result in methods.real_results():
            of_this_run = {method: kvjax.parse(method) for method in set(result.document["scores"]) - {"full"}}
            new = [method for method, value in of_this_run.items() if value not in shown]
            shown |= set(of_this_run.values())
            for method in new:
                device, host = result.document["bfloat16"][method]
                score = result.contexts(method, result.document["tasks"][0])
                row = f"| `{method}` | {device:.1%} | {host:.1%} | {100 * score.mean():.1f} ("
                in_it = name in [part.name for part in parse_parts(method)]
                assert (row in page) == in_it, (name, method)
                has_row |= in_it
        assert ("## On a real model" in page) == has_row, name


@pytest.mark.parametrize(
    ("citation", "link"),
    [
        ("KIVI, arXiv 2402.02750; A2SF, 2407.20485", "https://arxiv.org/abs/2407.20485"),
        ("CaM, ICML, openreview LCTmppB165", "https://openreview.net/forum?id=LCTmppB165"),
    ],
)
def test_citations_link_to_papers(citation, link):
    assert f"({link})" in methods.link_papers(citation)


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
    survey = field.load_systems()["survey"]
    assert [system["number"] for system in survey] == list(range(1, 54))
    assert sum("methods" in system or "calls" in system for system in survey) >= 45
    page = field.page()
    assert all(system["does"] in page for system in survey)


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ({"methods": ["snapkv", "wishful"]}, "X claims the method 'wishful', which kvjax does not have"),
        ({"calls": ["kvjax.wishful"]}, "X claims kvjax.wishful, which kvjax does not have"),
        ({}, "X has neither a method nor a call, nor a reason"),
    ],
)
def test_a_row_that_claims_what_there_is_not_is_an_error(claim, says):
    with pytest.raises(LookupError, match=says):
        field.check_system({"name": "X", **claim})


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
