"""Scores of a generated text, 0 to 1, each as the public implementation that published numbers come from.

Where an implementation has quirks that change numbers, they are kept and named: comparability is the point.
"""

from __future__ import annotations

import collections
import functools
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.errors import KvjaxError
from kvjax.eval.tasks.case import Ask
from kvjax.utils.packages import import_optional

Metric = Callable[[str, Ask], float]
Pair = Callable[[str, str], float]


def best_reference(pair: Pair) -> Metric:
    """Takes the best score over the references, 0 without any."""
    return lambda text, ask: max((float(pair(text, r)) for r in ask.references), default=0.0)


def first_line(metric: Metric) -> Metric:
    """Scores the first line that is not empty: LongBench's eval.py for trec, triviaqa and samsum."""
    return lambda text, ask: metric(text.lstrip("\n").split("\n")[0], ask)


def exact(text: str, reference: str) -> float:
    """Whether both are equal but for white space at their ends."""
    return float(text.strip() == reference.strip())


def contains_all(text: str, ask: Ask) -> float:
    """The fraction of references that occur in the text, in any case (RULER's string_match_all)."""
    return sum(r.lower() in text.lower() for r in ask.references) / max(1, len(ask.references))


def contains(text: str, reference: str) -> float:
    """Whether the reference occurs in the text, in any case (RULER's string_match_part, one reference)."""
    return float(reference.lower() in text.lower())


PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_words(text: str) -> list[str]:
    """Splits into lower-case words without punctuation and articles (SQuAD's normalization, as in LongBench)."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()


def qa_f1(text: str, reference: str) -> float:
    """F1 of the two bags of normalized words (LongBench's qa_f1_score)."""
    said, right = normalize_words(text), normalize_words(reference)
    common = sum((collections.Counter(said) & collections.Counter(right)).values())
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(right)
    return 2 * precision * recall / (precision + recall)


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L F1 of the package `rouge` 1.0.1, with its choices (LongBench's rouge_score).

    Sentences end at ".", words are split at white space in their own case, and the union of the longest common
    subsequences of all pairs of sentences is counted in distinct words. `rouge-score` lowers, drops every character
    but letters and digits, and takes one subsequence of all words with repetitions, so its numbers are others.
    """
    # White space alone counts as one empty word.
    said, right = ([part.split() or [""] for part in x.split(".") if part] for x in (text, reference))
    if not said or not right:
        return 0.0
    shared: set[str] = set()
    for r in right:
        for s in said:
            shared.update(_common_subsequence(r, s))
    precision = len(shared) / len({w for s in said for w in s})
    recall = len(shared) / len({w for r in right for w in r})
    return 2.0 * (precision * recall / (precision + recall + 1e-8))


def _common_subsequence(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """A longest common subsequence: the one found from the end, which leaves out words of y first."""
    table = [[0] * (len(y) + 1)]
    for a in x:
        above, row = table[-1], [0]
        for j, b in enumerate(y):
            row.append(above[j] + 1 if a == b else max(above[j + 1], row[j]))
        table.append(row)
    i, j, out = len(x), len(y), []
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            out.append(x[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return out


def classification(text: str, ask: Ask) -> float:
    """1 / (classes named) if the right one is among them (LongBench's classification_score).

    A class that is part of the right one's name does not count; as in LongBench, the class after it is then skipped.
    """
    best = 0.0
    for reference in ask.references:
        named = [c for c in ask.options if c in text]
        for c in named:  # removing while iterating skips the next one: so do the published numbers
            if c in reference and c != reference:
                named.remove(c)
        best = max(best, 1.0 / len(named) if reference in named else 0.0)
    return best


def count(text: str, reference: str) -> float:
    """The fraction of the numbers in the text that equal the reference (LongBench's count_score)."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def retrieval(text: str, reference: str) -> float:
    """`count` of the number in a reference like "Paragraph 7" (LongBench's retrieval_score).

    Raises:
      KvjaxError: the reference has no such number.
    """
    found = re.search(r"Paragraph (\d+)", reference)
    if not found:
        raise KvjaxError(f"a retrieval reference must read like 'Paragraph 7', got {reference!r}")
    return count(text, found[1])


def edit_similarity(text: str, reference: str) -> float:
    """Similarity of the first line without a comment to the reference line (LongBench's code_sim_score).

    It is the Indel similarity in whole percent, as in fuzzywuzzy with python-Levenshtein; without that package
    fuzzywuzzy falls back to difflib's ratio, which is never larger.
    """
    lines = text.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    return round(import_optional("rapidfuzz", "this metric needs").fuzz.ratio(line, reference)) / 100


def similarity(text: str, reference: str) -> float:
    """The Indel similarity of two texts of any number of lines, white space at their ends aside."""
    return import_optional("rapidfuzz", "this metric needs").fuzz.ratio(text.rstrip(), reference.rstrip()) / 100


def _gsm8k(text: str, reference: str, pattern: str, index: int) -> float:
    """lm-evaluation-harness, task gsm8k (version 3): a regex filter, then exact_match that ignores some patterns.

    The reference is the whole answer, or its number.
    """
    matches = re.findall(pattern, text)
    said = matches[index] if matches else "[invalid]"
    if isinstance(said, tuple):
        said = next(filter(None, said), "[invalid]")
    for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
        said, reference = re.sub(ignored, "", said.strip()), re.sub(ignored, "", reference)
    return float(said.lower() == reference.lower())


@functools.cache
def _rouge_scorer(kind: str) -> Any:
    return import_optional("rouge_score.rouge_scorer", "this metric needs").RougeScorer([kind], use_stemmer=True)


def rouge_score(kind: str) -> Metric:
    """F1 of `rouge-score` with stemming, as in HELM's summarization; kind: "rouge1", "rouge2" or "rougeL"."""
    return best_reference(lambda text, reference: _rouge_scorer(kind).score(reference, text.strip())[kind].fmeasure)


METRICS: dict[str, Metric] = {
    "exact": best_reference(exact),
    "contains_all": contains_all,
    "contains_any": best_reference(contains),
    "qa_f1": best_reference(qa_f1),
    "rouge_l": best_reference(rouge_l),
    "classification": classification,
    "qa_f1_line": first_line(best_reference(qa_f1)),
    "rouge_l_line": first_line(best_reference(rouge_l)),
    "classification_line": first_line(classification),
    "retrieval": best_reference(retrieval),
    "count": best_reference(count),
    "edit_similarity": best_reference(edit_similarity),
    "similarity": best_reference(similarity),
    # The first number after "#### "; and the last number of the text.
    "gsm8k_strict": best_reference(functools.partial(_gsm8k, pattern=r"#### (\-?[0-9\.\,]+)", index=0)),
    "gsm8k_flexible": best_reference(functools.partial(_gsm8k, pattern=r"(-?[$0-9.,]{2,})|(-?[0-9]+)", index=-1)),
    "rouge_xsum_1": rouge_score("rouge1"),
    "rouge_xsum_2": rouge_score("rouge2"),
    "rouge_xsum_l": rouge_score("rougeL"),
}
"""(text generated, cut at the ask's stop; ask) -> score from 0 to 1."""
