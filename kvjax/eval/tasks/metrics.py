"""Scores of a generated text, 0 to 1, each as the public implementation that published numbers come from.

Where an implementation has quirks that change numbers, they are kept and named: comparability is the point.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvjax.eval.tasks.case import Ask
from kvjax.utils.packages import import_optional

Metric = Callable[[str, Ask], float]
Pair = Callable[[str, str], float]


def best_reference(pair: Pair) -> Metric:
    """Takes the best score over the references, 0 without any."""
    return lambda text, ask: max((float(pair(text, r)) for r in ask.references), default=0.0)


def exact(text: str, reference: str) -> float:
    """Whether both are equal but for white space at their ends."""
    return float(text.strip() == reference.strip())


def contains_all(text: str, ask: Ask) -> float:
    """The fraction of references that occur in the text, in any case (RULER's string_match_all)."""
    return sum(r.lower() in text.lower() for r in ask.references) / max(1, len(ask.references))


def contains(text: str, reference: str) -> float:
    """Whether the reference occurs in the text, in any case (RULER's string_match_part, one reference)."""
    return float(reference.lower() in text.lower())


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
    "edit_similarity": best_reference(edit_similarity),
    "similarity": best_reference(similarity),
    "rouge_xsum_1": rouge_score("rouge1"),
    "rouge_xsum_2": rouge_score("rouge2"),
    "rouge_xsum_l": rouge_score("rougeL"),
}
"""(text generated, cut at the ask's stop; ask) -> score from 0 to 1."""
