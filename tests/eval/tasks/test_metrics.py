"""Metrics against hand-computed values and against the published definitions, written down again in another way."""

import functools
import random
import string
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.tasks.case import Ask
from kvjax.eval.tasks.metrics import METRICS
from kvjax.utils.packages import import_optional


def score(metric, text, *references, options=()):
    return METRICS[metric](text, Ask(np.zeros(1, np.int32), metric, references, 1, options=tuple(options)))


@pytest.mark.parametrize("metric", METRICS)
def test_best_of_the_references_and_nothing_for_nothing(metric):
    right = {"retrieval": "Paragraph 3", "gsm8k_strict": "#### 3", "count": "3", "gsm8k_flexible": "3"}
    right = right.get(metric, "grey harbour lights returned")
    options = ("grey harbour lights returned", "other")
    assert score(metric, right, right, options=options) == pytest.approx(1, abs=1e-7)
    if metric != "contains_all":
        other = "Paragraph 8" if metric == "retrieval" else "#### 8"
        assert score(metric, right, other, right, options=options) == pytest.approx(1, abs=1e-7)
    assert score(metric, "", right, options=options) == 0
    assert score(metric, right) == 0


@pytest.mark.parametrize(
    ("metric", "text", "references", "expected"),
    [
        ("exact", " a b\n", ["x", "a b"], 1),
        ("exact", "A b", ["a b"], 0),
        ("contains_all", "It is ALPHA and beta", ["alpha", "beta", "gamma", "delta"], 0.5),
        ("contains_any", "It is ALPHA", ["gamma", "alpha"], 1),
        ("qa_f1", "The cat's hat!", ["a cats hat"], 1),
        ("qa_f1", "cat cat dog", ["cat dog dog bird"], 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)),
        ("qa_f1", "the", ["a"], 0),  # nothing is left of either
        ("qa_f1_line", "\n\nParis\nQuestion: cat", ["Paris"], 1),
        ("qa_f1", "\n\nParis\nQuestion: cat", ["Paris"], 0.5),
        ("qa_f1_line", " \nParis", ["Paris"], 0),  # only line breaks are skipped
        ("count", "7 or 7 or 8", ["7"], 2 / 3),
        ("count", "seven", ["7"], 0),
        ("count", "07", ["7"], 0),
        ("retrieval", "Paragraph 12, or 1", ["Paragraph 12"], 0.5),
        ("retrieval", "12", ["Paragraph 12"], 1),
        ("edit_similarity", "\n\nabcd\nxyz", ["abxd"], 0.75),
        ("edit_similarity", "```python\n# a\n// b\nreturn x\n", ["return x"], 1),
        ("edit_similarity", "  \nreturn x", ["return x"], 0.2),  # a line of blanks is a line, as in the official code
        ("edit_similarity", "ab", ["abc"], 0.8),
        ("edit_similarity", "abc", ["abcdefgh"], 0.55),  # 6/11, in whole percent
        ("gsm8k_strict", "so 3\n#### 1,234.\n#### 7", ["thus\n#### 1234"], 1),
        ("gsm8k_strict", "#### $12", ["12"], 0),  # the dollar stands where the number is expected
        ("gsm8k_strict", "The answer is 12", ["12"], 0),
        ("gsm8k_flexible", "12 apples cost $1,234.", ["x #### 1234"], 1),
        ("gsm8k_flexible", "it is 12 - 5 = 7", ["12"], 0),
        ("gsm8k_flexible", "It is -5", ["-5"], 1),
        ("gsm8k_flexible", "It is 5 ...", ["5"], 0),  # "..." is what that pattern finds last
    ],
)
def test_values_by_hand(metric, text, references, expected):
    assert score(metric, text, *references) == pytest.approx(expected, abs=1e-12)


def test_classes_within_each_other():
    classes = ("Date", "City", "State", "Other location", "location")
    assert score("classification", "City", "City", options=classes) == 1
    assert score("classification", "City or Date", "City", options=classes) == 0.5
    # "location" is part of the right class's name, so it does not count
    assert score("classification", "Other location", "Other location", options=classes) == 1
    assert score("classification", "Other location", "location", options=classes) == 0.5
    # taking "A" out of (A, B, A B) skips "B", which therefore counts: so do the published numbers
    assert score("classification", "A B", "A B", options=("A", "B", "A B")) == 0.5
    assert score("classification", "A B", "A B", options=("A", "A B", "B")) == 1
    assert score("classification", "Date\nCity", "Date", options=classes) == 0.5
    assert score("classification_line", "Date\nCity", "Date", options=classes) == 1


@functools.cache
def longest_subsequence(x, y):
    """The length and the words, by the recursive definition; ties leave out a word of y."""
    if not x or not y:
        return 0, ()
    if x[-1] == y[-1]:
        n, words = longest_subsequence(x[:-1], y[:-1])
        return n + 1, (*words, x[-1])
    without_x, without_y = longest_subsequence(x[:-1], y), longest_subsequence(x, y[:-1])
    return without_x if without_x[0] > without_y[0] else without_y


def rouge_oracle(answer, reference):
    """F1 of distinct words in the union of all sentence pairs' subsequences."""
    answer, reference = ([s.split() for s in t.split(".") if s] for t in (answer, reference))
    union = {w for r in reference for s in answer for w in longest_subsequence(tuple(r), tuple(s))[1]}
    p, r = (Fraction(len(union), len({w for s in t for w in s})) for t in (answer, reference))
    return float(2 * p * r / (p + r)) if union else 0.0


def test_rouge_l_is_that_of_longbench():
    rng = random.Random(0)
    words = ["The", "the", "cat", "sat", "on", "mat,", "mat"]

    def text() -> str:
        return ". ".join(" ".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(3)) + "."

    for _ in range(200):
        answer, reference = text(), text()
        assert score("rouge_l", answer, reference) == pytest.approx(rouge_oracle(answer, reference), abs=1e-7)
    assert score("rouge_l", "...", "a") == score("rouge_l", "", "a") == score("rouge_l", "a", ".") == 0
    # three of the reference's four distinct words, all of them said: 2 * 1 * 0.75 / 1.75; "the" twice counts once
    assert score("rouge_l", "a b. the", "a b the the c") == pytest.approx(6 / 7, abs=1e-7)


def test_how_far_rouge_l_is_from_rouge_score():
    """The maintained library lowers, drops punctuation and takes one subsequence of all words: another number."""
    from rouge_score import rouge_scorer  # it imports nltk, which takes seconds

    def library_rouge_l(answer: str, reference: str) -> float:
        return rouge_scorer.RougeScorer(["rougeL"]).score(reference, answer)["rougeL"].fmeasure

    same = ("taxes rise on fuel", "taxes on fuel fall")
    assert score("rouge_l", *same) == pytest.approx(library_rouge_l(*same), abs=1e-7) == pytest.approx(0.75)
    swapped = ("cuts follow. taxes rise on fuel", "taxes rise on fuel. cuts follow")
    assert score("rouge_l", *swapped) == pytest.approx(1, abs=1e-7)
    assert library_rouge_l(*swapped) == pytest.approx(4 / 6)
    marks = ("Taxes rise, on fuel", "taxes rise on fuel")
    assert score("rouge_l", *marks) == pytest.approx(2 / 4, abs=1e-7)  # "Taxes" and "rise," are other words
    assert library_rouge_l(*marks) == pytest.approx(1)
    repeated = ("the tax the fuel the cuts", "the tax fuel cuts")
    assert score("rouge_l", *repeated) == pytest.approx(1, abs=1e-7)
    assert library_rouge_l(*repeated) == pytest.approx(2 * 4 / (6 + 4))


def test_rouge_of_xsum_against_its_definition():
    answer, reference = "police find man dead in york", "a man found dead in York police say"
    overlap = {1: 5, 2: 2}  # police, man, dead, in, york; dead in, in york

    def count_ngrams(text: str, n: int) -> Counter:
        return Counter(zip(*(text.lower().split()[i:] for i in range(n)), strict=False))

    for n in (1, 2):
        common = sum((count_ngrams(answer, n) & count_ngrams(reference, n)).values())
        assert common == overlap[n]
        p, r = common / (7 - n), common / (9 - n)
        assert score(f"rouge_xsum_{n}", answer, reference) == pytest.approx(2 * p * r / (p + r))
    subsequence = 4  # man dead in york
    assert score("rouge_xsum_l", answer, reference) == pytest.approx(2 * subsequence / (6 + 8))
    assert score("rouge_xsum_1", " Running!", "runs") == 1  # stems


def test_edit_similarity_is_the_longest_common_subsequence():
    rng = random.Random(1)
    for _ in range(100):
        x, y = ("".join(rng.choices("abc =", k=rng.randint(1, 12))) for _ in range(2))
        common = lcs_length(x, y)
        assert score("edit_similarity", x, y) == round(100 * 2 * common / (len(x) + len(y))) / 100


def lcs_length(x, y):
    table = np.zeros((len(x) + 1, len(y) + 1), int)
    for i, a in enumerate(x):
        for j, b in enumerate(y):
            table[i + 1, j + 1] = table[i, j] + 1 if a == b else max(table[i, j + 1], table[i + 1, j])
    return int(table[-1, -1])


def test_all_punctuation_is_dropped():
    assert score("qa_f1", f"grey{string.punctuation}", "grey") == 1


def test_errors_say_what_to_do():
    with pytest.raises(KvjaxError, match="'Paragraph 7', got 'Absatz 3'"):
        score("retrieval", "3", "Absatz 3")
    with pytest.raises(KvjaxError, match=r"pip install \"kvjax\[eval\]\""):
        import_optional("no_such_package", "this metric needs")
