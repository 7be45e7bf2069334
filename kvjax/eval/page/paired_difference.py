"""Two methods on the same cases: their difference, its 95% interval, and the verdict that it allows.

Differences are taken case by case, averaged per task and length, and then over these; the interval is that of this
mean, for fixed tasks and random cases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvjax.cache.protocol import Traits
from kvjax.errors import KvjaxError
from kvjax.eval.page import summary
from kvjax.eval.page.intervals import CONFIDENCE, Interval, average_interval, mean_interval, paired_interval
from kvjax.eval.page.summary import Record
from kvjax.registry.registration import Part
from kvjax.registry.strings import parse, split_methods
from kvjax.utils import display

SHOWN, NOT_SHOWN, WITHIN, NOT_RUN = "shown", "not shown", "within the error", "not in this run"
NEAR_LOSS = 0.02  # a loss below this, in score or in bits per byte, counts as near
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


Value = Callable[[Record], float | None]


def score(record: Record) -> float | None:
    """Returns a case's mean score, 0 to 1."""
    return float(np.mean(record["scores"])) if record["scores"] else None


def bits(record: Record) -> float | None:
    """Returns minus a case's bits per byte, so that more is better."""
    return None if record.get("bits") is None else -record["bits"]


def later_gain(record: Record) -> float | None:
    """Returns the score of a conversation's later questions minus that of its first one."""
    split = summary.first_later(record) if record.get("turns") else None
    return split[1] - split[0] if split else None


RANGES: dict[Value, tuple[float, float] | None] = {bits: None, later_gain: (-1, 1)}
"""Between which ends the values of a measure lie, None for no ends; of all others between 0 and 1."""

MEASURES: tuple[tuple[str, Value], ...] = (("score", score), ("bits per byte", bits))
LATER = "score, later - first question"


class MethodFacts(NamedTuple):
    """The facts about a method that a report uses."""

    traits: Traits
    parts: tuple[Part, ...]  # of its string; none for a user's own method

    def part(self, name: str) -> Mapping[str, Any] | None:
        """Returns the parameters of the part of that name, or None."""
        return next((part.values for part in self.parts if part.name == name), None)

    def sole_part(self, name: str) -> Mapping[str, Any] | None:
        """Returns the parameters of the part of that name, if the method has no other part."""
        return self.part(name) if len(self.parts) == 1 else None


class RecordedRun:
    """The records of a run by method and case, and facts about its methods."""

    def __init__(self, records: Iterable[Record]):
        self.cases: dict[str, dict[tuple, Record]] = {}
        self.methods: dict[str, MethodFacts] = {}
        for r in summary.latest(records):
            if r["task"] != summary.SPEED:
                self.cases.setdefault(r["method"], {})[r["task"], summary.length_of(r) or 0, r["key"]] = r
        for name, cases in self.cases.items():
            record = next(iter(cases.values()))
            try:
                self.methods[name] = MethodFacts(parse(name).traits, split_methods(name))
            except KvjaxError:  # a user's own method, whose traits are in its records
                if "traits" in record:
                    self.methods[name] = MethodFacts(Traits(**record["traits"]), ())

    @property
    def full(self) -> str | None:
        """The name of the exact method that keeps everything on the device."""
        return next((name for name, m in self.methods.items() if m.traits.exact and not m.traits.host), None)

    def difference(self, a: str, b: str, value: Value, task: str | None = None) -> Difference | None:
        """Returns a - b over the cases that both have; None without any."""
        # A stratum is a task at one length.
        strata: dict[tuple, list[tuple[float, float]]] = {}
        for key in sorted(self.cases[a].keys() & self.cases[b].keys()):
            x, y = value(self.cases[a][key]), value(self.cases[b][key])
            if x is not None and y is not None and task in (None, key[0]):
                strata.setdefault(key[:2], []).append((x, y))
        if not strata:
            return None
        pairs = [np.array(stratum) for stratum in strata.values()]  # [n 2]: the two methods' values of n cases
        left, right = np.mean([p.mean(0) for p in pairs], 0)
        num_cases, limits = sum(map(len, pairs)), RANGES.get(value, (0, 1))
        means = [float(x) for x in (p[:, 0].mean() - p[:, 1].mean() for p in pairs)]
        if limits is not None:
            least, width = limits[0], limits[1] - limits[0]
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


def judge_better(d: Difference) -> str:
    """Returns the verdict on "left is better than right"."""
    if d.low is None or d.high is None or d.low <= 0 <= d.high:
        return WITHIN
    return SHOWN if d.mean > 0 else NOT_SHOWN


def judge_near(d: Difference) -> str:
    """Returns the verdict on "left loses less than NEAR_LOSS against right"."""
    if d.low is None or d.high is None:
        return WITHIN
    if d.low >= -NEAR_LOSS:
        return SHOWN
    return NOT_SHOWN if d.high < -NEAR_LOSS else WITHIN


def keeps_up(d: Difference) -> bool:
    """Whether enough contexts show that left loses at most TOLERATED_LOSS against right."""
    return d.cases >= ENOUGH_CONTEXTS and d.low is not None and d.low >= -TOLERATED_LOSS


def format_number(x: float, measure: str) -> str:
    """Formats a value of a measure: bits per byte, or percent."""
    digits = f"{abs(x):.3f}" if measure.startswith("bits") else f"{abs(100 * x):.1f}"
    return ("−" if x < 0 and float(digits) else "") + digits


def format_difference(d: Difference, measure: str) -> str:
    """Formats left - right as it is read (bits per byte: less is better), with its interval."""
    read = d.reverse() if measure.startswith("bits") else d
    mean, *ends = (
        ("+" if x >= 0 else "") + format_number(x, measure) for x in (read.mean, read.low, read.high) if x is not None
    )
    return f"{mean} ({ends[0]} to {ends[1]})" if ends else mean


def describe_difference(d: Difference, measure: str, verdict: str) -> str:
    """Describes a difference in numbers, with the reason if the verdict is not SHOWN."""
    sign, unit = (-1, "bits per byte (less is better)") if measure.startswith("bits") else (1, "points")
    left, right = (format_number(sign * x, measure) for x in (d.left, d.right))
    is_level = measure != LATER and not measure.startswith("bits")  # a score, which can be near its ends
    if verdict == SHOWN:
        reason = ""
    elif d.low is None:
        reason = "; a single context has no interval"
    elif is_level and min(d.left, d.right) > 0.97:
        reason = "; both near 100, so these tasks do not tell them apart"
    elif is_level and max(d.left, d.right) < 0.03:
        reason = "; both near 0, so these tasks do not tell them apart"
    elif d.low == d.high == 0:
        reason = "; the same in every context"
    else:
        reason = "; too few contexts to tell" if verdict == WITHIN else "; the run says the opposite"
    contexts = display.count(d.cases, "context")
    return f"{left} against {right}: {format_difference(d, measure)} {unit}, {contexts}{reason}"


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
