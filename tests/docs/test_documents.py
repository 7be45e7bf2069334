"""The code in README, CONTRIBUTING and docs/ runs as it stands there, and prints what the pages show."""

from __future__ import annotations

import re
import shlex

import pytest

import kvjax
from kvjax.registry.loading import load_all
from kvjax.registry.registration import REGISTRY, is_builtin
from kvjax.testing import toy_model
from tests.helpers.documents import (
    FENCE,
    ONLY_PARSED,
    READERS_FILES,
    ROOT,
    check_command,
    code_blocks,
    commands,
    compare_output,
    inline_commands,
    page_commands,
    python_code,
    reason_not_to_run,
    run_command,
    run_page,
)

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "experiments/README.md")
SITE = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
"""The hand-written pages of the site."""
PAGES = [
    page
    for page in (*DOCUMENTS, *SITE)
    if any(block.language in ("python", "sh") for block in code_blocks(page)) or inline_commands(page)
]
RUN_ELSEWHERE = {"docs/coming_from.md": "test_coming_from.py", "docs/states.md": "test_states_document.py"}
"""Pages whose own tests run them, and look at what the blocks define."""

OWN_METHODS = {
    "value_norm": "value_norm:budget=40% + kvcrush + kivi:bits=4,group=4,residual=4",
    "received_attention": "received_attention:budget=8 + adakv:page=4 + int8",
    "last_tokens": "last_tokens:recent=6 + offload",
    "half": "half + kcache:n=4",
    "around_mean": "around_mean:bits=8 + snapkv:budget=8,window=2,kernel=3 + offload",
    "peaks": "peaks:budget=6 + int8",
    "top_tokens": "top_tokens:topk=4 + h2o:heavy=4,recent=4 + int8",
}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RUN_ELSEWHERE])
def test_a_page_runs_from_top_to_bottom_and_prints_what_it_shows(page, monkeypatch, tmp_path, clean_registry):
    run_page(page, monkeypatch, tmp_path)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


@pytest.mark.parametrize("page", SITE)
def test_no_line_of_a_page_is_longer_than_160_characters(page):
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert [f"{page}, line {i}: {line}" for i, line in enumerate(lines, 1) if len(line) > 160] == []


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md", "docs/results.md"])
def test_a_bullet_has_at_most_40_words(page):
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    bullets = re.findall(r"^[-*] (.*(?:\n  .*)*)", text, re.M)
    assert len(bullets) > 10
    assert [bullet for bullet in bullets if len(bullet.split()) > 40] == []


def test_the_readme_counts_the_methods_in_tens():
    ours = [entry for entry in load_all().values() if is_builtin(entry.make)]
    assert f"more than {(len(ours) - 1) // 10 * 10} ways to" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_page_with_code_is_run():
    with_code = {page for page in PAGES if python_code(page)}
    assert with_code >= {"README.md", "docs/writing_a_method.md", "docs/generation.md", *RUN_ELSEWHERE}


LISTED = """1. Run it:

    ```python title="a file.py"
    if True:
        print("one")
    ```

    ```text
    one
    ```

   - or so:
\t```sh
\tkvjax methods --json
\t```

```python
print("two")
```
"""


def test_blocks_within_lists_are_found_without_their_indentation(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text(LISTED, encoding="utf-8")
    monkeypatch.setattr("tests.helpers.documents.ROOT", tmp_path)
    listed, _, command, plain = code_blocks("page.md")
    assert (listed.code, listed.file, listed.output, listed.line) == (
        'if True:\n    print("one")\n',
        "a file.py",
        "one\n",
        3,
    )
    assert (command.language, command.code, plain.code) == ("sh", "kvjax methods --json\n", 'print("two")\n')


@pytest.mark.parametrize("page", (*DOCUMENTS, *SITE))
def test_no_fence_of_a_page_lies_outside_of_the_blocks_that_are_run(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [line for line in FENCE.sub("", text).splitlines() if "```" in line] == []


@pytest.mark.parametrize("page", (*DOCUMENTS, *SITE))
def test_methods_in_the_text_of_a_page_can_be_used(page, clean_registry):
    """Inline code is a method if its first word is the name of one."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    names = "|".join(load_all())
    for code in re.findall(rf"`((?:{names})(?::[^`]*| [+] [^`]*))`", text):
        if "FILE" not in code and "DIR" not in code and ".." not in code:
            kvjax.parse(code)


def test_every_reason_not_to_run_a_command_is_met_on_a_page():
    met = {reason_not_to_run(words) for page in PAGES for words in page_commands(page)}
    assert set(ONLY_PARSED) <= met


def test_commands_in_the_text_of_the_pages_are_run():
    run = [shlex.join(words) for page in PAGES for words in inline_commands(page) if not reason_not_to_run(words)]
    assert {"kvjax check --load my_method.py value_norm", "kvjax methods kivi", "kvjax eval --list"} <= set(run)


def test_a_command_that_ends_with_an_error_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="a page: kvjax methods kivy: kvjax: unknown method 'kivy'"):
        run_command(["kvjax", "methods", "kivy"], "a page")


def test_an_input_file_that_a_command_reads_is_one_that_the_page_names():
    texts = " ".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert [file for file in READERS_FILES if file not in texts] == []


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("kvjax eval --metod full", "unrecognized arguments: --metod"),
        ("kvjax generate --prompt x --method snapvk", "unknown method 'snapvk'"),
        ("kvjax eval --methods 'full; snapkv:buget=3'", "buget"),
        ("python -m experiments.bench.wishful", "no module experiments.bench.wishful"),
        ("python -m experiments.bench.prefill --lang", "unrecognized arguments: --lang"),
        ("python -m checkpoints_convert inspct SRC", "invalid choice: 'inspct'"),
        ("make wishful", "make wishful"),
    ],
)
def test_a_command_that_cannot_work_is_found(command, says):
    (words,) = commands(command)
    with pytest.raises((AssertionError, pytest.fail.Exception, kvjax.KvjaxError), match=re.escape(says)):
        check_command(words)


def test_an_output_that_differs_is_found():
    compare_output("1 of ... tokens\n", "1 of 20 tokens  \n", "a page")
    with pytest.raises(AssertionError, match="the page shows"):
        compare_output("1 of ... tokens\n", "2 of 20 tokens\n", "a page")


def test_of_a_table_of_the_evaluation_all_but_the_scores_is_compared():
    table = "      1,024-token contexts\n\n method   niah   turns   device  of full   host  tok/s\n ─────────\n"
    page_table = f"{table} full   100.0   75.0 ±9.1   2,066   100.0    0    -\n  percent right; KiB held\n...\n"
    wider = f"  {table} full        100.0        100.0   2,066   100.0    0    -\n  percent right;\n  KiB held\nwrote\n"
    compare_output(page_table, wider, "a page")
    for printed in (wider.replace("2,066", "2,067"), wider.replace(" full ", " int4 "), wider.replace("KiB", "MiB")):
        with pytest.raises(AssertionError, match="the page shows"):
            compare_output(page_table, printed, "a page")


@pytest.mark.parametrize(
    "code",
    [b for page in ("README.md", "docs/writing_a_method.md") for b in python_code(page) if "@register_method" in b],
)
def test_a_method_of_the_documents_generates_alone_and_in_company(code, clean_registry):
    before = set(REGISTRY)
    exec(compile(code, "document", "exec", dont_inherit=True), {"__name__": "document"})
    (name,) = set(REGISTRY) - before
    model, prompts = toy_model(), [list(range(1, 20)), [5, 6, 7]]
    for method in (name, OWN_METHODS[name]):
        together = kvjax.generate(model, prompts, method, max_new_tokens=4).tokens
        assert together[1] == kvjax.generate(model, prompts[1:], method, max_new_tokens=4).tokens[0]


LINKS = (*DOCUMENTS, "CHANGELOG.md", "experiments/LOG.md", *SITE)


@pytest.mark.parametrize("page", LINKS)
def test_links_of_a_page_lead_to_files_of_the_repository(page):
    """Generated pages are not in git: pages link to what is, and docs/hooks.py turns that into the site's page."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", text):
        assert ((ROOT / page).parent / target).exists(), target


def test_files_and_tables_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = re.findall(r"`((?:kvjax|checkpoints_convert|tests|docs|experiments)/[\w/]+(?:\.\w+|/))`", text)
    assert [file for file in files if "NAME" not in file and not (ROOT / file).exists()] == []
    tables = re.findall(r"`([A-Z_]{4,})`\s+(?:in|of)\s+`([\w/]+\.py)`", text)
    assert len(files) > 40 and len(tables) > 10
    for table, file in tables:
        assert re.search(rf"^{table}\b.* = ", (ROOT / file).read_text(encoding="utf-8"), re.M), (table, file)
