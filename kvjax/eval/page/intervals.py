"""95% confidence intervals of means over contexts, right also where every context agrees.

A standard error is 0 at twenty of twenty, and so says nothing of what the next context will do. Scores have Wilson's
interval in its place, and paired differences of scores have Newcombe's; for answers that are right or wrong they are
the published ones. A score between 0 and 1, such as the mean of a context's questions, varies less than a right or
wrong answer with the same mean, and counts as correspondingly more contexts (an effective sample size, Korn and
Graubard 1998). Bits per byte have no ends, and Student's interval.

Wilson, J. Am. Stat. Assoc. 22 (1927) 209; Newcombe, Statist. Med. 17 (1998) 2635, method 10; for sums of strata, Zou
and Donner, Statist. Med. 27 (2008) 1693.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95
_Z = 1.959963984540054  # of a normal distribution, on either side


class Interval(NamedTuple):
    """The two ends of a confidence interval."""

    low: float
    high: float


def score_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Returns Wilson's interval for the mean of at least one score, each from 0 to 1, of independent contexts."""
    x = np.asarray(values, float)
    n, p = _effective_contexts(x), float(x.mean())
    center, scale = p + _Z**2 / (2 * n), 1 + _Z**2 / n
    reach = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n * n))
    # Rounding may leave the mean itself outside at 0 and 1.
    return Interval(max(min((center - reach) / scale, p), 0.0), min(max((center + reach) / scale, p), 1.0))


def paired_interval(left: Sequence[float] | np.ndarray, right: Sequence[float] | np.ndarray) -> Interval:
    """Returns Newcombe's interval for mean(left) - mean(right), scores from 0 to 1 of the same contexts, in order."""
    a, b = np.asarray(left, float), np.asarray(right, float)
    p, q = float(a.mean()), float(b.mean())
    (a_low, a_high), (b_low, b_high) = score_interval(a), score_interval(b)
    r = _correlation(a, b)

    def distance(x: float, y: float) -> float:
        return math.sqrt(max(x * x - 2 * r * x * y + y * y, 0.0))

    return Interval(p - q - distance(p - a_low, b_high - q), p - q + distance(a_high - p, q - b_low))


def mean_interval(values: Sequence[float] | np.ndarray) -> Interval | None:
    """Returns Student's interval for the mean of values without ends; None for fewer than two."""
    x = np.asarray(values, float)
    if len(x) < 2:
        return None
    reach = float(stdtrit(len(x) - 1, (1 + CONFIDENCE) / 2)) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Interval(float(x.mean()) - reach, float(x.mean()) + reach)


def average_interval(means: Sequence[float], intervals: Sequence[Interval | None]) -> Interval | None:
    """Returns the interval for the average of independent means (of tasks, or of lengths); None if one has none."""
    low, high, middle = 0.0, 0.0, float(np.mean(means))
    for mean, interval in zip(means, intervals, strict=True):
        if interval is None:
            return None
        low, high = low + (mean - interval.low) ** 2, high + (interval.high - mean) ** 2
    return Interval(middle - math.sqrt(low) / len(means), middle + math.sqrt(high) / len(means))


def _effective_contexts(scores: np.ndarray) -> float:
    """How many contexts with right or wrong answers vary as little as these; their number where all are 0 or 1."""
    n = len(scores)
    # One context that is all right and one that is all wrong are added, since the spread of a few contexts may be 0.
    mean = (scores.sum() + 1) / (n + 2)
    variance = (np.square(scores).sum() + 1) / (n + 2) - mean**2
    return n * float(mean * (1 - mean) / variance)


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of pairs, with Newcombe's correction for continuity; 0 where one of the two never varies."""
    spread = float(a.std() * b.std())
    if not spread:
        return 0.0
    r = float(np.mean(a * b) - a.mean() * b.mean()) / spread
    if r <= 0:
        return r
    # For answers that are right or wrong this takes n / 2 from the numerator of phi, over counts.
    largest = math.sqrt(a.mean() * (1 - a.mean()) * b.mean() * (1 - b.mean()))
    return max(r - 1 / (2 * len(a) * largest), 0.0)
