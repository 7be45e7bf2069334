"""Names of tasks, and the cases of a choice of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.tasks import suite
from kvjax.eval.tasks.case import Ask, Case, Spec, TooShort

ASK = Ask(np.array([1]), "exact", ("a",), 1)


def maker(task):
    def make(model, spec):
        """One line.

        Another.
        """
        return (Case(task, f"{task}/{n}/0", np.arange(n), (ASK,)) for n in spec.lengths)

    return make


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    names = ("niah", "ruler.vt", "ruler.cwe", "ppl")
    monkeypatch.setattr(suite, "makers", lambda: {n: maker(n) for n in names})


def test_a_family_stands_for_its_tasks_and_each_is_taken_once():
    assert suite.expand(["ppl", "ruler", "ruler.vt", "ppl"]) == ["ppl", "ruler.vt", "ruler.cwe"]


def test_a_string_names_tasks_as_the_command_line_does():
    assert suite.expand("ppl") == ["ppl"]
    assert suite.expand("ppl, ruler,") == ["ppl", "ruler.vt", "ruler.cwe"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["nih"], "mean 'niah'?"),
        (["rulr"], "mean 'ruler'?"),
        ([""], "unknown task ''"),
        ([], "unknown task ''"),
        ("", "unknown task ''"),
        ("pp", "mean 'ppl'?"),
    ],
)
def test_an_unknown_name_is_told_the_nearest_one(names, says):
    with pytest.raises(KvjaxError, match="kvjax eval --list") as e:
        suite.expand(names)
    assert says in str(e.value)


def test_cases_in_the_order_of_the_tasks():
    cases = suite.cases(None, ["ruler", "niah"], Spec(lengths=(4, 8)))
    keys = ["ruler.vt/4/0", "ruler.vt/8/0", "ruler.cwe/4/0", "ruler.cwe/8/0", "niah/4/0", "niah/8/0"]
    assert [c.key for c in cases] == keys


def test_each_task_is_described_by_one_line():
    assert suite.describe_tasks()["niah"] == "One line."


def test_what_does_not_fit_is_left_out_where_somebody_is_told(monkeypatch):
    def long_only(model, spec):
        if min(spec.lengths) < 100:
            raise TooShort(f"does not fit in {min(spec.lengths)} tokens")
        return maker("long")(model, spec)

    monkeypatch.setattr(suite, "makers", lambda: {"niah": maker("niah"), "long": long_only})
    messages, spec = [], Spec(lengths=(40, 400))
    cases = suite.cases(None, ["niah", "long"], spec, messages.append)
    assert [c.key for c in cases] == ["niah/40/0", "niah/400/0", "long/400/0"]
    assert messages == ["left out: does not fit in 40 tokens"]
    with pytest.raises(TooShort, match="does not fit in 40"):
        suite.cases(None, ["niah", "long"], spec)
    with pytest.raises(KvjaxError, match="no task fits in any of the lengths; use others"):
        suite.cases(None, ["long"], Spec(lengths=(40, 50)), messages.append)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lengths": 64}, "lengths are one number of tokens or more, as in lengths=.1024,., got 64"),
        ({"lengths": ()}, "lengths are one number of tokens or more"),
        ({"lengths": (0,)}, "a length must be an integer from 1"),
        ({"contexts": 0}, "contexts must be an integer from 1"),
        ({"questions": -1}, "questions must be an integer from 1"),
        ({"depths": 1.5}, "depths must be an integer from 0"),
        ({"seed": -1}, "seed must be an integer from 0"),
    ],
)
def test_a_specification_is_checked(settings, says):
    with pytest.raises(KvjaxError, match=says):
        Spec(**settings)


def test_a_specification_takes_names_of_files():
    assert (Spec(text="a.txt").text, Spec(data="there").data) == (Path("a.txt"), Path("there"))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("ppl; ruler", "ppl,ruler"),
        ("ppl ruler", "ppl,ruler"),
        ("ppl, ruler niah", "ppl,ruler,niah"),
        ("512;1024", "512,1024"),
        ("512 | 1024", "512,1024"),
        ("ppl + ruler", "ppl,ruler"),
    ],
)
def test_commas_separate_the_words_of_a_list(text, meant):
    for split in (suite.split_words, suite.expand):
        with pytest.raises(KvjaxError, match=f"is no list: commas separate its words; write '{meant}'$"):
            split(text)
    assert suite.split_words(meant) == meant.split(",")
