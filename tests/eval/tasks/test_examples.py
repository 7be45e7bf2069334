"""Prompts that lack solved examples: said once for each task, by the run and on its page."""

from __future__ import annotations

import json

import pytest

from kvjax.errors import KvjaxWarning
from kvjax.eval.page import report
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Spec
from tests.eval import fake_run
from tests.eval.tasks.test_gsm8k_xsum import MODEL, QUESTION, article, solved_problem, write


def case_messages(data, task, *lengths):
    """The messages while the cases are made."""
    messages = []
    suite.cases(MODEL, [task], Spec(lengths=lengths or (8192,), data=data), messages.append)
    return messages


@pytest.fixture
def data(tmp_path):
    for name, make_line in (("gsm8k", solved_problem), ("xsum", lambda i: article(str(i)))):
        write(tmp_path / name / "test.jsonl", [make_line(i) for i in range(3)])
        write(tmp_path / name / "train.jsonl", [make_line(i) for i in range(10, 20)])
    return tmp_path


def test_nothing_is_said_of_prompts_that_lack_none(data):
    assert case_messages(data, "gsm8k.strict") == case_messages(data, "xsum.rouge_1") == []


@pytest.mark.parametrize(("task", "num_examples"), [("gsm8k.strict", 8), ("xsum.rouge_1", 3)])
def test_a_missing_or_short_file_of_examples_is_said_once_for_a_task(data, task, num_examples):
    name = task.partition(".")[0]
    train = data / name / "train.jsonl"
    train.write_text(train.read_text().partition("\n")[0] + "\n")
    lacking = f"1 of {num_examples} solved examples: {name}/train.jsonl has no more that can be used"
    assert case_messages(data, task) == [f"{task}: {lacking}"]
    train.unlink()
    lacking = f"0 of {num_examples} solved examples: no {name}/train.jsonl in the folder of --data"
    assert case_messages(data, task, 8192, 4096) == [f"{task}: {lacking}"]
    with pytest.warns(KvjaxWarning, match=lacking):
        suite.cases(MODEL, [task], Spec(lengths=(8192,), data=data))


def test_lengths_without_room_for_all_are_said(data):
    one = len(f"Question: {solved_problem(10)['question']}\nAnswer: {solved_problem(10)['answer']}\n\n")
    first, second = one * 2 + 60, one * 4 + 60
    why = f"no room for more in {first} tokens, no room for more in {second} tokens"
    assert case_messages(data, "gsm8k.strict", first, second, 8192) == [
        f"gsm8k.strict: 2 to 4 of 8 solved examples: {why}"
    ]


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
