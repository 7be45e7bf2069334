"""Head shares in exact fractions, one prompt at a time, from kvjax's own rule (`kvjax/methods/head_shares.py`).

A table gives the fraction of a text that each head keeps when the heads of the model keep a given fraction in the mean.
Between these fractions, and to nothing at 0 and everything at 1, a head's fraction is interpolated linearly. One amount
is then added to all heads until the model's budget is met; no head goes below the tokens that always stay, or above the
prompt. Units are whole: the largest remainders are rounded up, and ties (to a millionth) go to the lower layer, then to
the lower head.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np


def head_fraction(head_fractions: list[float], fractions: list[float], mean_fraction: Fraction) -> Fraction:
    """The fraction that a head keeps when all heads keep `mean_fraction` in the mean."""
    known = [
        (Fraction(0), Fraction(0)),
        *((Fraction(f), Fraction(s)) for f, s in zip(fractions, head_fractions, strict=True)),
    ]
    known.append((Fraction(1), Fraction(1)))
    for (left, low), (right, high) in zip(known, known[1:], strict=False):
        if left <= mean_fraction <= right:
            return low + (high - low) * (mean_fraction - left) / (right - left)
    raise AssertionError(mean_fraction)


def match_total(targets: list[Fraction], total: int, most: int) -> list[Fraction]:
    """Adds one amount to all targets, within 0..most, so that they sum to `total`."""

    def shift(amount: Fraction) -> list[Fraction]:
        return [min(max(target + amount, Fraction(0)), Fraction(most)) for target in targets]

    breakpoints = sorted({-target for target in targets} | {most - target for target in targets})
    for left, right in zip(breakpoints, breakpoints[1:], strict=False):
        low, high = sum(shift(left)), sum(shift(right))
        if low <= total <= high:
            amount = left if low == high else left + (right - left) * (total - low) / (high - low)
            return shift(amount)
    return shift(breakpoints[-1] if total else breakpoints[0])


def split_prompt(n: int, budget: int, sinks: int, recent: int, unit_tokens: int) -> tuple[int, int, int]:
    """Splits a prompt -> (tokens always kept, whole units between them, units that a head keeps in the mean)."""
    budget = min(n, max(budget, sinks + recent))
    front = min(sinks, budget)
    back = min(recent, budget - front)
    between = n - front - back
    always = front + back + min(between % unit_tokens, budget - front - back)
    return always, between // unit_tokens, (budget - always) // unit_tokens


def head_tokens(
    table, fractions, n: int, budget: int, sinks: int = 0, recent: int = 0, unit_tokens: int = 1
) -> np.ndarray:
    """The tokens that each head keeps of n, i64[L K], by a table [L][K][R]."""
    always, units, mean_units = split_prompt(n, budget, sinks, recent, unit_tokens)
    mean_fraction = Fraction(always + mean_units * unit_tokens, n)
    targets = [
        (head_fraction(head, fractions, mean_fraction) * n - always) / unit_tokens for heads in table for head in heads
    ]
    shifted = [round(x, 6) for x in match_total(targets, mean_units * len(targets), units)]
    num_units = [int(x) for x in shifted]
    order = sorted(range(len(num_units)), key=lambda i: (num_units[i] - shifted[i], i))
    for i in order[: mean_units * len(targets) - sum(num_units)]:
        num_units[i] += 1
    return always + unit_tokens * np.array(num_units).reshape(len(table), -1)


def select_tokens(scores: list[float], num_kept: int, sinks: int, recent: int) -> list[int]:
    """Selects `num_kept` tokens of a head by its scores; ties go to the earlier token."""
    n = len(scores)
    ends = [*range(min(sinks, n)), *range(max(n - recent, min(sinks, n)), n)]
    between = sorted(set(range(n)) - set(ends), key=lambda s: (-scores[s], s))
    return sorted([*ends, *between[: num_kept - len(ends)]])
