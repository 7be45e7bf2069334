"""Head shares in exact fractions, one prompt at a time: how many tokens each head of a model keeps, and which.

A table says which part of a text each head keeps when the heads of the model keep a given fraction of it in the mean.
Between these fractions, and to nothing at 0 and everything at 1, a head's part is on a straight line. Its tokens are
then moved, all heads' by one amount, until the model's budget is met; no head goes below what always stays, or above
the prompt. Units are whole: the largest remainders are rounded up, and of remainders that are equal to a millionth
those of the lower layer, then of the lower head.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np


def part(shares: list[float], fractions: list[float], at: Fraction) -> Fraction:
    """What a head keeps where all keep the fraction `at` in the mean."""
    known = [(Fraction(0), Fraction(0)), *((Fraction(f), Fraction(s)) for f, s in zip(fractions, shares, strict=True))]
    known.append((Fraction(1), Fraction(1)))
    for (left, low), (right, high) in zip(known, known[1:], strict=False):
        if left <= at <= right:
            return low + (high - low) * (at - left) / (right - left)
    raise AssertionError(at)


def levelled(wanted: list[Fraction], total: int, most: int) -> list[Fraction]:
    """All moved by the one amount with which they sum to `total`, within 0..most."""

    def moved(amount: Fraction) -> list[Fraction]:
        return [min(max(want + amount, Fraction(0)), Fraction(most)) for want in wanted]

    corners = sorted({-want for want in wanted} | {most - want for want in wanted})
    for left, right in zip(corners, corners[1:], strict=False):
        low, high = sum(moved(left)), sum(moved(right))
        if low <= total <= high:
            amount = left if low == high else left + (right - left) * (total - low) / (high - low)
            return moved(amount)
    return moved(corners[-1] if total else corners[0])


def always_and_units(n: int, budget: int, sinks: int, recent: int, size: int) -> tuple[int, int, int]:
    """Of a prompt: tokens that stay in any case, whole units between, and units that a head keeps in the mean."""
    budget = min(n, max(budget, sinks + recent))
    front = min(sinks, budget)
    back = min(recent, budget - front)
    between = n - front - back
    always = front + back + min(between % size, budget - front - back)
    return always, between // size, (budget - always) // size


def numbers(shares, fractions, n: int, budget: int, sinks: int = 0, recent: int = 0, size: int = 1) -> np.ndarray:
    """Shares [L][K][R] -> tokens that each head keeps of n, i64[L K]."""
    always, units, mean = always_and_units(n, budget, sinks, recent, size)
    at = Fraction(always + mean * size, n)
    wanted = [(part(head, fractions, at) * n - always) / size for heads in shares for head in heads]
    exact = [round(x, 6) for x in levelled(wanted, mean * len(wanted), units)]
    whole = [int(x) for x in exact]
    order = sorted(range(len(whole)), key=lambda i: (whole[i] - exact[i], i))
    for i in order[: mean * len(wanted) - sum(whole)]:
        whole[i] += 1
    return always + size * np.array(whole).reshape(len(shares), -1)


def kept(scores: list[float], number: int, sinks: int, recent: int) -> list[int]:
    """The tokens that a head keeps, so many, by its scores; of equal scores the earlier token."""
    n = len(scores)
    ends = [*range(min(sinks, n)), *range(max(n - recent, min(sinks, n)), n)]
    between = sorted(set(range(n)) - set(ends), key=lambda s: (-scores[s], s))
    return sorted([*ends, *between[: number - len(ends)]])
