"""Two methods on the same cases: their difference, its 95% interval, and whether one keeps up with the other.

Differences are taken case by case, averaged per task and length, and then over these; the interval is that of this
mean, for fixed tasks and random cases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from kvjax.cache.protocol import Traits
from kvjax.errors import KvjaxError
from kvjax.eval.page import summary
from kvjax.eval.page.intervals import CONFIDENCE, Interval, average_interval, mean_interval, paired_interval
from kvjax.eval.page.summary import Record
from kvjax.registry.strings import parse
from kvjax.utils import display

TOLERATED_LOSS = 0.05  # in score or in bits per byte: the most that a method of the page's headline may lose
ENOUGH_CONTEXTS = 16  # of a task of the headline; with fewer a method that is right in all may lose 20 points


@dataclasses.dataclass(frozen=True)
class Difference:
    """`mean` = `left` - `right`, its 95% interval (None: bits of a single case), and over how many cases."""

    mean: float
    low: float | None
    high: float | None
    left: float
    right: float
    cases: int

    def reverse(self) -> Difference:
        """Returns right - left."""
        low, high = (None if x is None else -x for x in (self.high, self.low))
        return Difference(-self.mean, low, high, self.right, self.left, self.cases)


class Measure(NamedTuple):
    """A number of each case, of which more is better; None where a case has none.

    `ends` are the least and the largest value that it can take, None for no ends.
    """

    name: str
    value: Callable[[Record], float | None]
    ends: tuple[float, float] | None


SCORE = Measure("score", lambda r: float(np.mean(r["scores"])) if r["scores"] else None, (0, 1))
BITS = Measure("bits per byte", lambda r: None if r.get("bits") is None else -r["bits"], None)
MEASURES = (SCORE, BITS)


class RecordedRun:
    """The records of a run by method and case, and the traits of its methods."""

    def __init__(self, records: Iterable[Record]):
        self.cases: dict[str, dict[tuple, Record]] = {}
        self.traits: dict[str, Traits] = {}
        for r in summary.latest(records):
            if r["task"] != summary.SPEED:
                self.cases.setdefault(r["method"], {})[r["task"], summary.length_of(r) or 0, r["key"]] = r
        for name, cases in self.cases.items():
            record = next(iter(cases.values()))
            try:
                self.traits[name] = parse(name).traits
            except KvjaxError:  # a user's own method, whose traits are in its records
                if "traits" in record:
                    self.traits[name] = Traits(**record["traits"])

    @property
    def full(self) -> str | None:
        """The name of the exact method that keeps everything on the device."""
        return next((name for name, traits in self.traits.items() if traits.exact and not traits.host), None)

    def difference(self, a: str, b: str, measure: Measure, task: str | None = None) -> Difference | None:
        """Returns a - b over the cases that both have; None without any."""
        # A stratum is a task at one length.
        strata: dict[tuple, list[tuple[float, float]]] = {}
        for key in sorted(self.cases[a].keys() & self.cases[b].keys()):
            x, y = measure.value(self.cases[a][key]), measure.value(self.cases[b][key])
            if x is not None and y is not None and task in (None, key[0]):
                strata.setdefault(key[:2], []).append((x, y))
        if not strata:
            return None
        pairs = [np.array(stratum) for stratum in strata.values()]  # [n 2]: the two methods' values of n cases
        left, right = np.mean([p.mean(0) for p in pairs], 0)
        num_cases = sum(map(len, pairs))
        means = [float(x) for x in (p[:, 0].mean() - p[:, 1].mean() for p in pairs)]
        if measure.ends is not None:
            least, width = measure.ends[0], measure.ends[1] - measure.ends[0]
            ends = [paired_interval(*((p - least) / width).T) for p in pairs]
            interval = average_interval(means, [Interval(width * low, width * high) for low, high in ends])
        elif min(map(len, pairs)) > 1:
            interval = average_interval(means, [mean_interval(p[:, 0] - p[:, 1]) for p in pairs])
        else:
            # A stratum of a single case has no spread of its own, so all gaps are pooled.
            gaps = np.concatenate([p[:, 0] - p[:, 1] for p in pairs])
            shift, pooled = float(left - right - gaps.mean()), mean_interval(gaps)
            interval = pooled and Interval(pooled.low + shift, pooled.high + shift)
        low, high = (None, None) if interval is None else interval
        return Difference(float(left - right), low, high, float(left), float(right), num_cases)


def keeps_up(d: Difference) -> bool:
    """Whether enough contexts show that left loses at most TOLERATED_LOSS against right."""
    return d.cases >= ENOUGH_CONTEXTS and d.low is not None and d.low >= -TOLERATED_LOSS


def format_number(x: float, measure: str) -> str:
    """Formats a value of a measure: bits per byte, or percent."""
    digits = f"{abs(x):.3f}" if measure.startswith("bits") else f"{abs(100 * x):.1f}"
    return ("−" if x < 0 and float(digits) else "") + digits


def describe_loss(d: Difference, measure: str) -> str:
    """Says what was seen of left and right, and the largest loss that this leaves open."""
    is_text = measure.startswith("bits")
    left, right = (format_number(-x if is_text else x, measure) for x in (d.left, d.right))
    seen = f"{left} against {right} in {display.count(d.cases, 'context')}"
    if not is_text and d.left == d.right == 1:
        seen = f"{d.cases:,} of {d.cases:,} right, like the exact cache"
    if d.low is None:
        return seen
    loss, unit = format_number(max(-d.low, 0.0), measure), "bits per byte" if is_text else "points"
    return f"{seen}; the loss is at most {loss} {unit} with {CONFIDENCE:.0%} confidence"
