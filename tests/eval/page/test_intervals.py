"""95% intervals against the published formulas, written once more over counts, and against published values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvjax.eval.page.intervals import average_interval, mean_interval, paired_interval, score_interval

Z = 1.959963984540054


def wilson(right: int, n: int) -> tuple[float, float]:
    """Newcombe 1998 (17:857), method 3."""
    p, q = right / n, 1 - right / n
    root = Z * math.sqrt(Z * Z + 4 * n * p * q)
    return (2 * n * p + Z * Z - root) / (2 * (n + Z * Z)), (2 * n * p + Z * Z + root) / (2 * (n + Z * Z))


def newcombe(e: int, f: int, g: int, h: int) -> tuple[float, float]:
    """Newcombe 1998 (17:2635), method 10: e pairs are right in both, f in the first, g in the second, h in none."""
    n = e + f + g + h
    (l2, u2), (l3, u3) = wilson(e + f, n), wilson(e + g, n)
    p2, p3 = (e + f) / n, (e + g) / n
    product, numerator = (e + f) * (g + h) * (e + g) * (f + h), e * h - f * g
    phi = 0.0
    if product:
        phi = (max(numerator - n / 2, 0) if numerator > 0 else numerator) / math.sqrt(product)
    below = (p2 - l2) ** 2 - 2 * phi * (p2 - l2) * (u3 - p3) + (u3 - p3) ** 2
    above = (u2 - p2) ** 2 - 2 * phi * (u2 - p2) * (p3 - l3) + (p3 - l3) ** 2
    return p2 - p3 - math.sqrt(below), p2 - p3 + math.sqrt(above)


def pairs(e: int, f: int, g: int, h: int) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat([1.0, 1.0, 0.0, 0.0], (e, f, g, h)), np.repeat([1.0, 0.0, 1.0, 0.0], (e, f, g, h))


@pytest.mark.parametrize(
    ("right", "n", "published"),
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718))],
)
def test_wilsons_interval_has_the_published_values(right, n, published):
    """Newcombe's Table I of 1998, method 3."""
    found = score_interval([1.0] * right + [0.0] * (n - right))
    assert found == pytest.approx(published, abs=1e-4) and found == pytest.approx(wilson(right, n), abs=1e-12)


@pytest.mark.parametrize(
    ("counts", "published"),
    [
        ((36, 12, 2, 0), (0.0569, 0.3404)),
        ((18, 12, 2, 18), (0.0562, 0.3290)),
        ((53, 0, 0, 1), (-0.0729, 0.0729)),
        ((0, 30, 0, 0), (0.8395, 1.0)),
        ((1, 1, 7, 12), (-0.507, -0.026)),
    ],
)
def test_newcombes_interval_has_the_published_values(counts, published):
    """Newcombe's examples of 1998; the last is that of Fagerland, Lydersen and Laake, Statist. Med. 33 (2014) 2850."""
    found = paired_interval(*pairs(*counts))
    assert found == pytest.approx(published, abs=5e-4 if counts[0] == 1 else 1e-4)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_every_table_of_a_few_pairs_is_that_of_the_formula(n):
    tables = [(e, f, g, n - e - f - g) for e in range(n + 1) for f in range(n + 1 - e) for g in range(n + 1 - e - f)]
    for counts in tables:
        left, right = pairs(*counts)
        assert paired_interval(left, right) == pytest.approx(newcombe(*counts), abs=1e-7), counts
        assert score_interval(left) == pytest.approx(wilson(counts[0] + counts[1], n), abs=1e-12), counts


@pytest.mark.parametrize("n", [1, 2, 16, 20, 400])
@pytest.mark.parametrize("value", [0.0, 0.25, 0.5, 1.0])
def test_contexts_that_all_agree_leave_an_interval(n, value):
    low, high = score_interval([value] * n)
    assert 0 <= low <= value <= high <= 1 and high - low > 0.2 / n
    low, high = paired_interval([value] * n, [value] * n)
    assert low < 0 < high and low == pytest.approx(-high) and (n > 2 or high > 0.25)


def test_twenty_of_twenty_may_lose_sixteen_points():
    assert score_interval([1.0] * 20) == pytest.approx((20 / (20 + Z * Z), 1))
    assert paired_interval([1.0] * 20, [1.0] * 20)[0] == pytest.approx(-0.1611, abs=1e-4)
    assert paired_interval([1.0] * 73, [1.0] * 73)[0] > -0.05 > paired_interval([1.0] * 72, [1.0] * 72)[0]


def test_scores_between_the_ends_vary_less_and_count_as_more_contexts():
    rng = np.random.default_rng(0)
    scores = rng.beta(8, 8, 400)
    low, high = score_interval(scores)
    reach = Z * scores.std(ddof=1) / math.sqrt(400)
    assert high - low == pytest.approx(2 * reach, rel=0.1) and high - low < 0.5 * np.subtract(*wilson(200, 400)[::-1])
    other = np.clip(scores + rng.normal(0, 0.05, 400), 0, 1)
    low, high = paired_interval(scores, other)
    error = (scores - other).std(ddof=1) / math.sqrt(400)
    assert (high + low) / 2 == pytest.approx((scores - other).mean(), abs=error)
    assert 1.9 * Z * error < high - low < 3 * Z * error


def test_intervals_cover_the_truth_as_often_as_they_say():
    """Contexts of four questions, at an edge where two standard errors cover far too little."""
    rng, covered, by_errors, n, runs = np.random.default_rng(1), 0, 0, 20, 1500
    for _ in range(runs):
        chance = rng.beta(9.6, 0.4, n)  # of a context's questions, which are right or wrong together; mean 0.96
        left, right = (rng.binomial(4, chance) / 4 for _ in range(2))
        low, high = paired_interval(left, right)
        covered += low <= 0 <= high
        inside = score_interval(left)
        by_errors += inside.low <= 0.96 <= inside.high
    assert covered / runs > 0.94 and by_errors / runs > 0.94


def test_a_mean_without_ends_has_students_interval():
    assert mean_interval([1.0, 2.0, 4.0]) == pytest.approx(
        (7 / 3 - 4.302653 * math.sqrt(7 / 9), 7 / 3 + 4.302653 * math.sqrt(7 / 9)), abs=1e-5
    )
    assert mean_interval([1.0]) is None and mean_interval([]) is None
    draw = np.random.default_rng(1)
    found = [mean_interval(draw.normal(1.0, 2.0, 5)) for _ in range(1000)]
    assert 0.93 < np.mean([low < 1 < high for low, high in found]) < 0.97


def test_an_average_of_means_adds_squares():
    first, second = score_interval([1.0] * 20), score_interval([0.0] * 20)
    low, high = average_interval([1.0, 0.0], [first, second])
    assert (low, high) == pytest.approx((0.5 - (1 - first.low) / 2, 0.5 + second.high / 2))
    assert average_interval([1.0, 0.0], [first, None]) is None
