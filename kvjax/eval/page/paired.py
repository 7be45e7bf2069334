"""Two methods on the same cases: their difference, its error, and what may be said of it.

Differences are taken case by case, averaged per task and length, and then over these; the error is that of this mean,
for fixed tasks and random cases.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.cache.protocol import Traits
from kvjax.errors import KvjaxError
from kvjax.eval.page import summary
from kvjax.eval.page.summary import Record
from kvjax.methods.strings import Part, parse, split_methods

SHOWN, NOT_SHOWN, WITHIN, NOT_RUN = "shown", "not shown", "within the error", "not in this run"
NEAR = 0.02  # a loss below this, in score or in bits per byte, counts as near
ERRORS = 2  # standard errors that a difference has to exceed
LOSS = 0.05  # in score or in bits per byte: the most that a method may lose to be named beside the exact one
ENOUGH = 16  # contexts; of fewer, a method that fails one in ten shows no failure in more than one run of six


@dataclasses.dataclass(frozen=True)
class Difference:
    """`mean` = `left` - `right`, its standard error (None with a single case), and over how many cases."""

    mean: float
    error: float | None
    left: float
    right: float
    cases: int


Value = Callable[[Record], float | None]


def score(record: Record) -> float | None:
    """A case's mean score, 0 to 1."""
    return float(np.mean(record["scores"])) if record["scores"] else None


def bits(record: Record) -> float | None:
    """Minus a case's bits per byte, so that more is better."""
    return None if record.get("bits") is None else -record["bits"]


def kept_later(record: Record) -> float | None:
    """How much better the later questions of a conversation are answered than its first; minus the loss."""
    split = summary.first_later(record) if record.get("turns") else None
    return split[1] - split[0] if split else None


MEASURES: tuple[tuple[str, Value], ...] = (("score", score), ("bits per byte", bits))
LATER = "score, later - first question"


class Known(NamedTuple):
    """What a report knows of a method."""

    traits: Traits
    parts: tuple[Part, ...]  # the recipes that its name is made of; none for a method of somebody's own

    def part(self, recipe: str) -> Mapping[str, Any] | None:
        """The parameters of that recipe among its parts, or None."""
        return next((part.values for part in self.parts if part.name == recipe), None)

    def alone(self, recipe: str) -> Mapping[str, Any] | None:
        """The parameters of that recipe, if the method is nothing else."""
        return self.part(recipe) if len(self.parts) == 1 else None

    def without(self, recipe: str) -> list[Part]:
        """The other parts, in an order of their own."""
        return sorted((part for part in self.parts if part.name != recipe), key=str)


def known(record: Record) -> Known | None:
    """What the name of a record's method says, or else what the record says of it; None where neither does."""
    try:
        return Known(parse(record["method"]).traits, split_methods(record["method"]))
    except KvjaxError:  # a method of somebody's own
        return Known(Traits(**record["traits"]), ()) if "traits" in record else None


class Run:
    """The records of a run by method and case, and what is known of its methods."""

    def __init__(self, records: Iterable[Record]):
        kept = [r for r in summary.latest(records) if r["task"] != summary.SPEED]
        self.cases: dict[str, dict[tuple, Record]] = {}
        for r in kept:
            self.cases.setdefault(r["method"], {})[r["task"], summary.length_of(r) or 0, r["key"]] = r
        found = {name: known(next(iter(cases.values()))) for name, cases in self.cases.items()}
        self.methods: dict[str, Known] = {name: k for name, k in found.items() if k is not None}

    @property
    def full(self) -> str | None:
        """The name of the exact method that holds everything on the device."""
        return next((name for name, m in self.methods.items() if m.traits.exact and not m.traits.host), None)

    def difference(self, a: str, b: str, value: Value, task: str | None = None) -> Difference | None:
        """a - b over the cases that both have; None without any."""
        strata: dict[tuple, list[tuple[float, float]]] = {}
        for key in sorted(self.cases[a].keys() & self.cases[b].keys()):
            x, y = value(self.cases[a][key]), value(self.cases[b][key])
            if x is not None and y is not None and task in (None, key[0]):
                strata.setdefault(key[:2], []).append((x, y))
        return _difference([np.array(s) for s in strata.values()]) if strata else None

    def parts(self, a: str, b: str, value: Value) -> tuple[tuple[str, Difference], ...]:
        """The same by task."""
        tasks = dict.fromkeys(task for task, _, _ in self.cases[a])
        found = ((task, self.difference(a, b, value, task)) for task in tasks)
        return tuple((task, d) for task, d in found if d)


def _difference(strata: Sequence[np.ndarray]) -> Difference:
    """Each stratum [n 2]: the two methods' values of n cases."""
    left, right = np.mean([s.mean(0) for s in strata], 0)
    gaps = [s[:, 0] - s[:, 1] for s in strata]
    cases = sum(map(len, gaps))
    if min(map(len, gaps)) > 1:
        error = math.sqrt(sum(g.var(ddof=1) / len(g) for g in gaps)) / len(gaps)
    else:  # a single case has no spread of its own
        every = np.concatenate(gaps)
        error = float(every.std(ddof=1)) / math.sqrt(cases) if cases > 1 else None
    return Difference(float(left - right), error, float(left), float(right), cases)


def better(d: Difference) -> str:
    """The verdict on "left is better than right"."""
    if d.error is None or abs(d.mean) <= ERRORS * d.error:
        return WITHIN
    return SHOWN if d.mean > 0 else NOT_SHOWN


def near(d: Difference) -> str:
    """The verdict on "left loses less than NEAR against right"."""
    if d.error is None:
        return WITHIN
    if -d.mean + ERRORS * d.error <= NEAR:
        return SHOWN
    return NOT_SHOWN if -d.mean - ERRORS * d.error > NEAR else WITHIN


def keeps_up(d: Difference) -> bool:
    """Whether enough contexts show that left loses at most LOSS against right."""
    return d.cases >= ENOUGH and d.error is not None and -d.mean + ERRORS * d.error <= LOSS


def number(x: float, measure: str) -> str:
    """A value of a measure for people."""
    digits = f"{abs(x):.3f}" if measure.startswith("bits") else f"{abs(100 * x):.1f}"
    return ("−" if x < 0 and float(digits) else "") + digits


def signed(d: Difference, measure: str) -> str:
    """Left - right as it is read (bits per byte: less is better), with its error."""
    mean = -d.mean if measure.startswith("bits") else d.mean
    error = "" if d.error is None else f" ± {number(d.error, measure)}"
    return ("+" if mean >= 0 else "") + number(mean, measure) + error


def text(d: Difference, measure: str, verdict: str) -> str:
    """The numbers of a difference, and where an order does not appear in them why."""
    sign, unit = (-1, "bits per byte (less is better)") if measure.startswith("bits") else (1, "points")
    left, right = (number(sign * x, measure) for x in (d.left, d.right))
    return f"{left} beside {right}: {signed(d, measure)} {unit}, {d.cases:,} contexts{_reason(d, measure, verdict)}"


def _reason(d: Difference, measure: str, verdict: str) -> str:
    if verdict == SHOWN:
        return ""
    if d.error is None:
        return "; a single context has no error"
    level = measure != LATER and not measure.startswith("bits")
    if level and min(d.left, d.right) > 0.97:
        return "; both near 100, so these tasks do not tell them apart"
    if level and max(d.left, d.right) < 0.03:
        return "; both near 0, so these tasks do not tell them apart"
    if not d.mean and not d.error:
        return "; the same in every context"
    return "; too few contexts to tell" if verdict == WITHIN else "; the run says the opposite"
