"""Metrics against hand-computed values and against the published definitions, written down again in another way."""

import random
from collections import Counter

import numpy as np
import pytest

from kvjax.errors import KvjaxError
from kvjax.eval.tasks.case import Ask
from kvjax.eval.tasks.metrics import METRICS
from kvjax.utils.packages import import_optional


def score(metric, text, *references):
    return METRICS[metric](text, Ask(np.zeros(1, np.int32), metric, references, 1))


@pytest.mark.parametrize("metric", METRICS)
def test_best_of_the_references_and_nothing_for_nothing(metric):
    right = "grey harbour lights returned"
    assert score(metric, right, right) == pytest.approx(1, abs=1e-7)
    if metric != "contains_all":
        assert score(metric, right, "#### 8", right) == pytest.approx(1, abs=1e-7)
    assert score(metric, "", right) == 0
    assert score(metric, right) == 0


@pytest.mark.parametrize(
    ("metric", "text", "references", "expected"),
    [
        ("exact", " a b\n", ["x", "a b"], 1),
        ("exact", "A b", ["a b"], 0),
        ("contains_all", "It is ALPHA and beta", ["alpha", "beta", "gamma", "delta"], 0.5),
        ("contains_any", "It is ALPHA", ["gamma", "alpha"], 1),
        ("edit_similarity", "\n\nabcd\nxyz", ["abxd"], 0.75),
        ("edit_similarity", "```python\n# a\n// b\nreturn x\n", ["return x"], 1),
        ("edit_similarity", "  \nreturn x", ["return x"], 0.2),  # a line of blanks is a line, as in the official code
        ("edit_similarity", "ab", ["abc"], 0.8),
        ("edit_similarity", "abc", ["abcdefgh"], 0.55),  # 6/11, in whole percent
    ],
)
def test_values_by_hand(metric, text, references, expected):
    assert score(metric, text, *references) == pytest.approx(expected, abs=1e-12)


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


def test_errors_say_what_to_do():
    with pytest.raises(KvjaxError, match=r"pip install \"kvjax\[eval\]\""):
        import_optional("no_such_package", "this metric needs")
