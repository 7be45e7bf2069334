"""Claims of the papers about the order of methods, checked on a run.

A claim is a line of the table `CLAIMS`. It uses the names and traits of methods alone, so that new methods take part:
a paper's method by its registered name, all others by their traits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.eval.page import summary
from kvjax.eval.page.paired_difference import (
    LATER,
    MEASURES,
    NOT_RUN,
    SHOWN,
    Difference,
    RecordedRun,
    describe_difference,
    judge_better,
    judge_near,
    later_gain,
)
from kvjax.eval.page.summary import Record, Row

FEW_BITS = "it has one bit per query head to tell tokens apart, few on a model of few heads (the paper's: 32)"
WINDOW_METHODS = ("streaming_llm", "sinks_and_recent")  # all of them lose the tokens before their recent ones


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
    check: Callable[[RecordedRun], Iterator[Finding]]


def _finding(a: str, b: str, measure: str, verdict: str, d: Difference, **more) -> Finding:
    text = describe_difference(d, measure, verdict)
    return Finding("", f"{a} against {b}", measure, verdict, d, text, **more)


def _compare(run: RecordedRun, a: str, b: str, judge: Callable[[Difference], str] = judge_better) -> Iterator[Finding]:
    for measure, value in MEASURES:
        if d := run.difference(a, b, value):
            tasks = dict.fromkeys(task for task, _, _ in run.cases[a])
            by_task = ((task, run.difference(a, b, value, task)) for task in tasks)
            parts = tuple((task, part) for task, part in by_task if part)
            yield _finding(a, b, measure, judge(d), d, parts=parts if len(parts) > 1 else ())


def _kcache_near(run: RecordedRun) -> Iterator[Finding]:
    for name, m in run.methods.items():
        own = m.sole_part("kcache")
        if run.full and own and 64 <= own["n"] <= 128 and own["device_layers"]:
            yield from _compare(run, name, run.full, judge_near)


def _kcache_layers(run: RecordedRun) -> Iterator[Finding]:
    kcache = {name: own for name, m in run.methods.items() if (own := m.sole_part("kcache"))}
    for name, own in kcache.items():
        without = next((x for x, other in kcache.items() if other == {**own, "device_layers": 0}), None)
        if own["device_layers"] and without:
            yield from _compare(run, name, without)


def _specache(run: RecordedRun, width: int) -> Iterator[Finding]:
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


def _kvcrush(run: RecordedRun) -> Iterator[Finding]:
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


def _streaming(run: RecordedRun) -> Iterator[Finding]:
    rivals = [name for name, m in run.methods.items() if not any(map(m.part, WINDOW_METHODS))]
    for name, m in run.methods.items():
        own = m.part("streaming_llm")
        if own is None:
            continue
        value = functools.partial(_far_needle_score, recent=own["recent"])
        gaps = {x: d for x in rivals if (d := run.difference(x, name, value))}
        if gaps:
            lowest = min(gaps, key=lambda x: gaps[x].mean)
            measure = f"score, needles with more than {own['recent']:,} tokens after them"
            finding = _finding(lowest, name, measure, judge_better(gaps[lowest]), gaps[lowest])
            yield dataclasses.replace(finding, subject=f"{lowest}, the next lowest, against {name}")


def _later_questions(run: RecordedRun, evicts: bool) -> Iterator[Finding]:
    """Compares gains at later questions with those of the exact method, for eviction or for offloading alone."""
    for name, m in run.methods.items():
        is_meant = m.traits.evicts if evicts else m.traits.host and not m.traits.evicts
        if run.full and is_meant and (d := run.difference(name, run.full, later_gain)):
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


def check(rows: Sequence[Row], records: Iterable[Record]) -> list[Finding]:
    """Returns one finding per claim, pair of methods and measure that the run has.

    A NOT_RUN finding names the methods and tasks that a claim still needs. Only methods of `rows` take part.
    """
    run = RecordedRun(records)
    shown = {r["method"] for r in rows}
    run.methods = {name: m for name, m in run.methods.items() if name in shown}
    findings: list[Finding] = []
    for claim in CLAIMS:
        checked = [dataclasses.replace(f, claim=claim.text) for f in claim.check(run)]
        findings += checked or [Finding(claim.text, claim.needs, "", NOT_RUN)]
    return findings
