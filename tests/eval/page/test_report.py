"""The page: one file that loads nothing, its structure and numbers, and sorting in a browser where there is one."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from kvjax import cli
from kvjax.errors import KvjaxError
from kvjax.eval.page import report
from tests.eval import fake_run
from tests.helpers import browser

VOID = {"meta", "input", "br", "wbr", "img", "link", "hr"}
METHODS = ["full", "offload", "kivi:bits=1", "specache:bits=1", "snapkv:budget=256"]


class Page(HTMLParser):
    """Elements as (tag, attributes), the words of each cell, and whether all is closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.cells: list[tuple[str, dict, str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag in ("td", "th"):
            self.cells.append((tag, dict(attributes), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            tag, attributes, text = self.cells[-1]
            self.cells[-1] = tag, attributes, text + data.strip()

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    run = {"methods": METHODS, "tasks": ["niah", "turns.recall", "ppl"], "lengths": [512, 1024], "cases": 10}
    return report.write(fake_run.write(tmp_path_factory.mktemp("run"), **run))


@pytest.fixture(scope="module")
def text(path):
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_tables_have_every_method_task_and_cost_with_units(page):
    assert len(page.all("table")) == 2
    heads = [words for tag, a, words in page.cells if tag == "th" and a.get("scope") == "col"]
    units = ("0 to 100", "bits/byte", "% as full", "%", "KiB", "seconds", "tokens/s")
    columns = 1 + 4 + 5  # method; niah, turns, bits, as full; of full, device, host, prefill, tokens/s
    assert len(heads) == 2 * columns and all(words.endswith(units) for words in heads if words != "method")
    assert len(page.all("td")) == 2 * len(METHODS) * (columns - 1)
    assert ["open" in a for a in page.all("details")] == [False, True]  # 512 and 1,024 tokens


def test_headline_is_computed(text):
    flat = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", text))
    assert "5 methods on 3 tasks, with contexts of 512 to 1,024 tokens: 60 contexts and 100 questions" in flat
    assert "No task has 16 contexts of 1,024 tokens, and fewer cannot show" in flat and "Fewest bytes" not in flat


def flat_text(page_text):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page_text))


def test_headline_names_who_keeps_up_where_enough_contexts_show_it(tmp_path):
    run = {"methods": METHODS, "tasks": ["niah", "ppl"], "lengths": [1024], "cases": 24}
    flat = flat_text(report.write(fake_run.write(tmp_path, **run)).read_text(encoding="utf-8"))
    assert "shown to lose at most 5 points or 0.05 bits per byte against full at 1,024 tokens" in flat
    assert "offload, 1.0% of the exact cache's bytes in bfloat16: ppl" in flat
    assert "full, 100.0% of the exact cache's bytes in bfloat16: niah" in flat
    seen = "niah: offload, 24 of 24 right, like the exact cache; the loss is at most 13.8 points with 95% confidence"
    assert seen in flat


def score_records(scores):
    """Records of methods with these scores in each context."""
    for method, of_contexts in scores.items():
        for i, score in enumerate(of_contexts):
            base = fake_run.record(method, "niah", 512, i, fake_run.np.random.default_rng(0))
            yield base | {"scores": [float(score)]}


@pytest.mark.parametrize(
    ("full", "own", "loss"),
    [
        ([1] * 20, [1] * 20, "20 of 20 right, like the exact cache; the loss is at most 16.1 points"),
        ([1] * 16, [1] * 16, "16 of 16 right, like the exact cache; the loss is at most 19.4 points"),
        ([0] * 20, [0] * 20, "0.0 against 0.0 in 20 contexts; the loss is at most 16.1 points"),
        ([0.5] * 20, [0.5] * 20, "50.0 against 50.0 in 20 contexts; the loss is at most "),
        ([1, 0] * 10, [1, 0] * 10, "50.0 against 50.0 in 20 contexts; the loss is at most 9.0 points"),
    ],
)
def test_contexts_that_all_agree_do_not_show_that_a_method_loses_little(full, own, loss):
    html = report.render(list(score_records({"full": full, "kivi:bits=1": own})), {})
    flat = flat_text(html)
    assert "full, 100.0% of the exact cache's bytes in bfloat16: niah" in flat and loss in flat
    assert "with 95% confidence" in flat and "±" not in flat.replace("(..) and ±", "")


def test_enough_contexts_that_all_agree_do_show_it():
    flat = flat_text(report.render(list(score_records({"full": [1] * 80, "kivi:bits=1": [1] * 80})), {}))
    assert "kivi:bits=1, 13.0% of the exact cache's bytes in bfloat16: niah" in flat
    assert "with 95% confidence" not in flat


def test_numbers_of_the_table(page):
    rows = [c for c in page.cells if c[0] == "td" or c[1].get("scope") == "row"]
    kivi = next(i for i, c in enumerate(rows) if c[2] == "kivi:bits=1")
    percent, device = rows[kivi + 5 : kivi + 7]
    # A row's percentages have three digits after the point.
    assert float(percent[1]["data-v"]) == round(100 * 0.27 / 2.08, 3) and percent[2] == "13.0"
    assert float(device[1]["data-v"]) == pytest.approx(69, abs=1) and device[2] == "69"


def test_what_the_run_says_is_escaped(text):
    assert "a &lt;fast&gt; one" in text and "a <fast> one" not in text


SHOWN = "details[open]"  # of the tables, one for each length
METHODS_SHOWN = f"[...document.querySelectorAll('{SHOWN} tbody tr')].map((row) => row.cells[0].innerText.trim())"


@pytest.mark.skipif(browser.path() is None, reason="no Chromium; `make` brings one where npm is")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_all_charts_sorts_and_loads_nothing(path, tmp_path, dark):
    by_bytes = ["offload", "kivi:bits=1", "specache:bits=1", "snapkv:budget=256", "full"]
    with browser.Browser(tmp_path) as tab:
        tab.open(path, width=500, dark=dark)

        def sort_by(column: int) -> list[str]:
            tab.ask(f"document.querySelectorAll('{SHOWN} thead th')[{column}].click()")
            return tab.ask(METHODS_SHOWN)

        assert tab.ask(METHODS_SHOWN) == METHODS
        assert sort_by(5) == by_bytes and sort_by(5) == by_bytes[::-1]
        assert tab.ask(f"document.querySelectorAll('{SHOWN} thead th')[5].getAttribute('aria-sort')") == "descending"
        assert sort_by(0) == METHODS
        tab.wait_until("document.querySelectorAll('.chart svg').length === document.querySelectorAll('.chart').length")
        assert tab.ask("document.querySelectorAll('.chart').length") == 6
        assert "specache:bits=1" in tab.ask("document.getElementById('tradeoff-1024').textContent")
        assert tab.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        requests = [e["params"]["request"]["url"] for e in tab.events if e.get("method") == "Network.requestWillBeSent"]
        assert requests == [path.resolve().as_uri()] and tab.complaints() == []


def test_without_run_json_and_with_unknown_fields(tmp_path):
    more = fake_run.record("full", "ppl", 512, 0, fake_run.np.random.default_rng(0)) | {"unheard_of": [1]}
    lines = [fake_run.speed("full", 512), more]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report.write(tmp_path).read_text(encoding="utf-8")
    assert "The directory has no run.json" in text
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(KvjaxError, match="run.json is missing or damaged"):
        report.write(tmp_path)


def test_the_command_says_what_to_do_without_run_json(tmp_path, capsys):
    fake_run.write(tmp_path, methods=["full"], tasks=["niah"], lengths=[512], cases=1)
    (tmp_path / "run.json").unlink()
    assert cli.main(["report", str(tmp_path)]) == 0
    error = capsys.readouterr().err
    assert "has records but no run.json" in error and "copy it again" in error


def test_tasks_without_a_length_of_their_own():
    lines = [r | {"about": {}} for r in fake_run.records(["full", "offload"], ["ruler.vt", "ruler.fwe"], [512], 3)]
    page = Page(report.render(report.summary.latest(lines), {}))
    assert len(page.all("table")) == 1 and not page.all("input")
