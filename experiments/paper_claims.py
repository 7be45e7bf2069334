"""Orders of methods that the papers claim, checked on a run.

    python -m experiments.paper_claims out/run

A claim is a line of the table `CLAIMS`. It uses the names and traits of methods alone, so that new methods take part:
a paper's method by its registered name, all others by their traits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax import KvjaxError
from kvjax.cache.protocol import Traits
from kvjax.eval.page import summary
from kvjax.eval.page.paired_difference import MEASURES, Difference, Measure, RecordedRun, format_number
from kvjax.eval.page.summary import Record
from kvjax.eval.run import store
from kvjax.registry.registration import Part
from kvjax.registry.strings import split_methods
from kvjax.utils import display

SHOWN, NOT_SHOWN, WITHIN, NOT_RUN = "shown", "not shown", "within the error", "not in this run"
NEAR_LOSS = 0.02  # a loss below this, in score or in bits per byte, counts as near
FEW_BITS = "it has one bit per query head to tell tokens apart, few on a model of few heads (the paper's: 32)"
LATER = "score, later - first question"
WINDOW_METHODS = ("streaming_llm", "sinks_and_recent")  # all of them lose the tokens before their recent ones


class MethodFacts(NamedTuple):
    """The facts about a method that claims use."""

    traits: Traits
    parts: tuple[Part, ...]  # of its string; none for a user's own method

    def part(self, name: str) -> Mapping[str, Any] | None:
        """Returns the parameters of the part of that name, or None."""
        return next((part.values for part in self.parts if part.name == name), None)

    def sole_part(self, name: str) -> Mapping[str, Any] | None:
        """Returns the parameters of the part of that name, if the method has no other part."""
        return self.part(name) if len(self.parts) == 1 else None


class Run(RecordedRun):
    """The records of a run, and the parts of its methods."""

    def __init__(self, records: Iterable[Record]):
        super().__init__(records)
        self.methods: dict[str, MethodFacts] = {}
        for name, traits in self.traits.items():
            try:
                self.methods[name] = MethodFacts(traits, split_methods(name))
            except KvjaxError:
                self.methods[name] = MethodFacts(traits, ())


@dataclasses.dataclass(frozen=True)
class Finding:
    """One claim and the run's verdict: SHOWN, NOT_SHOWN, WITHIN (the error) or NOT_RUN."""

    claim: str
    subject: str  # the methods, or what the run lacks
    measure: str  # "score", "bits per byte", ...
    verdict: str
    difference: Difference | None = None
    text: str = ""  # the numbers, and the reason if the claim is not shown
    parts: tuple[tuple[str, Difference], ...] = ()  # by task


class Claim(NamedTuple):
    """An order of methods that a paper reports."""

    text: str
    needs: str  # the methods and tasks that a run must have
    check: Callable[[Run], Iterator[Finding]]


def later_gain(record: Record) -> float | None:
    """Returns the score of a conversation's later questions minus that of its first one."""
    split = summary.first_later(record) if record.get("turns") else None
    return split[1] - split[0] if split else None


LATER_GAIN = Measure(LATER, later_gain, (-1, 1))


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


def _finding(a: str, b: str, measure: str, verdict: str, d: Difference, **more) -> Finding:
    text = describe_difference(d, measure, verdict)
    return Finding("", f"{a} against {b}", measure, verdict, d, text, **more)


def _compare(run: Run, a: str, b: str, judge: Callable[[Difference], str] = judge_better) -> Iterator[Finding]:
    for measure in MEASURES:
        if d := run.difference(a, b, measure):
            tasks = dict.fromkeys(task for task, _, _ in run.cases[a])
            by_task = ((task, run.difference(a, b, measure, task)) for task in tasks)
            parts = tuple((task, part) for task, part in by_task if part)
            yield _finding(a, b, measure.name, judge(d), d, parts=parts if len(parts) > 1 else ())


def _kcache_near(run: Run) -> Iterator[Finding]:
    for name, m in run.methods.items():
        own = m.sole_part("kcache")
        if run.full and own and 64 <= own["n"] <= 128 and own["device_layers"]:
            yield from _compare(run, name, run.full, judge_near)


def _kcache_layers(run: Run) -> Iterator[Finding]:
    kcache = {name: own for name, m in run.methods.items() if (own := m.sole_part("kcache"))}
    for name, own in kcache.items():
        without = next((x for x, other in kcache.items() if other == {**own, "device_layers": 0}), None)
        if own["device_layers"] and without:
            yield from _compare(run, name, without)


def _specache(run: Run, width: int) -> Iterator[Finding]:
    """Compares with KIVI with the same codes and as many exact tokens, if there is one (the paper, section 4.1)."""
    codes = ("bits", "group", "one_bit")
    kivi = {name: own for name, m in run.methods.items() if (own := m.sole_part("kivi"))}
    for name, m in run.methods.items():
        own = m.sole_part("specache")
        if own is None or own["bits"] != width:
            continue
        exact = own["residual"] + own["topk"]
        gaps = {x: abs(k["residual"] - exact) for x, k in kivi.items() if all(k[c] == own[c] for c in codes)}
        if gaps:
            yield from _compare(run, name, min(gaps, key=gaps.__getitem__))


def _kvcrush(run: Run) -> Iterator[Finding]:
    for name, m in run.methods.items():
        if m.part("kvcrush") is None:
            continue
        rest = sorted((part for part in m.parts if part.name != "kvcrush"), key=str)
        for other, base in run.methods.items():
            if base.parts and sorted(base.parts, key=str) == rest:
                for f in _compare(run, name, other):
                    yield f if f.verdict == SHOWN else dataclasses.replace(f, text=f"{f.text}; {FEW_BITS}")


def _far_needle_score(record: Record, recent: int) -> float | None:
    """The mean score of the needles that more than `recent` tokens follow."""
    if not any(word in record["task"] for word in ("niah", "needle")):
        return None
    depths = [a.get("depth", record.get("about", {}).get("depth")) for a in record.get("asks", [])]
    length = record.get("tokens") or summary.length_of(record) or 0
    pairs = zip(depths, record["scores"], strict=False)
    far = [s for depth, s in pairs if depth is not None and (1 - depth) * length > recent]
    return float(np.mean(far)) if far else None


def _streaming(run: Run) -> Iterator[Finding]:
    rivals = [name for name, m in run.methods.items() if not any(map(m.part, WINDOW_METHODS))]
    for name, m in run.methods.items():
        own = m.part("streaming_llm")
        if own is None:
            continue
        words = f"score, needles with more than {own['recent']:,} tokens after them"
        measure = Measure(words, functools.partial(_far_needle_score, recent=own["recent"]), (0, 1))
        gaps = {x: d for x in rivals if (d := run.difference(x, name, measure))}
        if gaps:
            lowest = min(gaps, key=lambda x: gaps[x].mean)
            finding = _finding(lowest, name, words, judge_better(gaps[lowest]), gaps[lowest])
            yield dataclasses.replace(finding, subject=f"{lowest}, the next lowest, against {name}")


def _later_questions(run: Run, evicts: bool) -> Iterator[Finding]:
    """Compares gains at later questions with those of the exact method, for eviction or for offloading alone."""
    for name, m in run.methods.items():
        is_meant = m.traits.evicts if evicts else m.traits.host and not m.traits.evicts
        if run.full and is_meant and (d := run.difference(name, run.full, LATER_GAIN)):
            # The claim about eviction is a loss, so the sign turns.
            verdict = judge_better(d.reverse()) if evicts else judge_near(d)
            yield _finding(name, run.full, LATER, verdict, d)


CLAIMS: tuple[Claim, ...] = (
    Claim("KCache with 64 to 128 values is near full", "full; kcache:n=64,device_layers=1", _kcache_near),
    Claim("KCache gains from first layers on the device", "kcache:n=64,device_layers=0", _kcache_layers),
    Claim(
        "SpeCache is better than KIVI at 1 bit", "kivi:bits=1; specache:bits=1", functools.partial(_specache, width=1)
    ),
    Claim(
        "SpeCache is better than KIVI at 2 bits", "kivi:bits=2; specache:bits=2", functools.partial(_specache, width=2)
    ),
    Claim(
        "KVCrush is better than its base at equal budget", "snapkv:budget=256; snapkv:budget=256 + kvcrush", _kvcrush
    ),
    Claim("StreamingLLM is worst at far needles", "streaming_llm:recent=252, and the task niah", _streaming),
    Claim(
        "Eviction loses on later questions",
        "full; snapkv:budget=256, and turns",
        functools.partial(_later_questions, evicts=True),
    ),
    Claim("Offloading does not", "full; offload, and turns", functools.partial(_later_questions, evicts=False)),
)


def check(records: Iterable[Record]) -> list[Finding]:
    """Returns one finding per claim, pair of methods and measure that the run has.

    A NOT_RUN finding names the methods and tasks that a claim still needs.
    """
    run = Run(records)
    findings: list[Finding] = []
    for claim in CLAIMS:
        checked = [dataclasses.replace(f, claim=claim.text) for f in claim.check(run)]
        findings += checked or [Finding(claim.text, claim.needs, "", NOT_RUN)]
    return findings


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", type=Path, help="the folder that kvjax eval wrote")
    claim = ""
    for f in check(store.read(p.parse_args(argv).run)):
        if f.claim != claim:
            print(f"\n{f.claim}" if claim else f.claim)
        claim = f.claim
        if f.verdict == NOT_RUN:
            print(f"  {NOT_RUN}: it needs {f.subject}")
            continue
        print(f"  {f.verdict}: {f.subject}; {f.measure}: {f.text}")
        for task, d in f.parts:
            print(f"    {task} {format_difference(d, f.measure)}")


if __name__ == "__main__":
    main()
