"""Prompts that lack solved examples: said once for each task, by the run and on its page."""

from __future__ import annotations

import json

import pytest

from kvjax.errors import KvjaxWarning
from kvjax.eval.page import report
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Spec
from tests.eval import fake_run
from tests.eval.tasks.test_xsum import MODEL, QUESTION, article, write


def case_messages(data, task, *lengths):
    """The messages while the cases are made."""
    messages = []
    suite.cases(MODEL, [task], Spec(lengths=lengths or (8192,), data=data), messages.append)
    return messages


@pytest.fixture
def data(tmp_path):
    write(tmp_path / "xsum" / "test.jsonl", [article(str(i)) for i in range(3)])
    write(tmp_path / "xsum" / "train.jsonl", [article(str(i)) for i in range(10, 20)])
    return tmp_path


def test_nothing_is_said_of_prompts_that_lack_none(data):
    assert case_messages(data, "xsum.rouge_1") == []


def test_a_missing_or_short_file_of_examples_is_said_once_for_a_task(data):
    task, train = "xsum.rouge_1", data / "xsum" / "train.jsonl"
    train.write_text(train.read_text().partition("\n")[0] + "\n")
    lacking = "1 of 3 solved examples: xsum/train.jsonl has no more that can be used"
    assert case_messages(data, task) == [f"{task}: {lacking}"]
    train.unlink()
    lacking = "0 of 3 solved examples: no xsum/train.jsonl in the folder of --data"
    assert case_messages(data, task, 8192, 4096) == [f"{task}: {lacking}"]
    with pytest.warns(KvjaxWarning, match=lacking):
        suite.cases(MODEL, [task], Spec(lengths=(8192,), data=data))


def test_lengths_without_room_for_all_are_said(data):
    messages = case_messages(data, "xsum.rouge_1", 1000, 1600, 8192)
    why = "no room for more in 1000 tokens, no room for more in 1600 tokens"
    assert messages == [f"xsum.rouge_1: 0 to 1 of 3 solved examples: {why}"]


def test_prompts_that_bring_their_examples_lack_none(data):
    line = {"article": f"###\nArticle: Two met.{QUESTION}", "summary_gt": "They met."}
    write(data / "xsum" / "test.jsonl", [line])
    assert case_messages(data, "xsum.rouge_1") == []


def test_the_page_says_it(tmp_path):
    directory = fake_run.write(tmp_path, methods=["full"], tasks=["niah"], lengths=[512], cases=2)
    records = [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]
    for r in records:
        r["about"] |= {"shots": 0, "wanted": 8, "lacking": "no <i>train.jsonl"} if r["task"] == "niah" else {}
    write(directory / "records.jsonl", records)
    page = report.write(directory).read_text(encoding="utf-8")
    assert page.count("niah: 0 of 8 solved examples: no &lt;i&gt;train.jsonl.") == 1
