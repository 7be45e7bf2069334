"""The orders that the papers let one expect, checked on a run.

A claim is a line of the table `CLAIMS`. It asks of methods only what their names and traits say, so that new methods
take part: those of a named paper by its recipe, all others by what they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.eval.page import summary
from kvjax.eval.page.paired_difference import (
    ERRORS,
    LATER,
    MEASURES,
    NEAR,
    NOT_RUN,
    NOT_SHOWN,
    SHOWN,
    WITHIN,
    Difference,
    Known,
    Run,
    Value,
    better,
    bits,
    kept_later,
    near,
    score,
    signed,
    text,
)
from kvjax.eval.page.summary import Record, Row

__all__ = [
    "CLAIMS",
    "ERRORS",
    "MEASURES",
    "NEAR",
    "NOT_RUN",
    "NOT_SHOWN",
    "SHOWN",
    "WITHIN",
    "Claim",
    "Difference",
    "Finding",
    "Run",
    "better",
    "bits",
    "check",
    "near",
    "score",
    "signed",
]

FEW_BITS = "it has one bit per query head to tell tokens apart, few on a model of few heads (the paper's: 32)"
BESIDE_A_WINDOW = ("streaming_llm", "sinks_and_recent")  # all of them lose what lies before their recent tokens


@dataclasses.dataclass(frozen=True)
class Finding:
    """One expected order, and what the run says: `verdict` is SHOWN, NOT_SHOWN, WITHIN (the error) or NOT_RUN."""

    claim: str
    subject: str  # which methods, or what is missing
    measure: str  # of what: "score", "bits per byte", ...
    verdict: str
    difference: Difference | None = None
    text: str = ""  # the numbers, and where an order does not appear why
    parts: tuple[tuple[str, Difference], ...] = ()  # by task


class Claim(NamedTuple):
    """An order that a paper lets one expect."""

    text: str
    needs: str  # what a run must hold to be checked
    look: Callable[[Run], Iterator[Finding]]  # in what the run holds


def _found(a: str, b: str, measure: str, verdict: str, d: Difference, **more) -> Finding:
    return Finding("", f"{a} beside {b}", measure, verdict, d, text(d, measure, verdict), **more)


def _compare(run: Run, a: str, b: str, judge: Callable[[Difference], str] = better) -> Iterator[Finding]:
    for measure, value in MEASURES:
        if d := run.difference(a, b, value):
            parts = run.parts(a, b, value)
            yield _found(a, b, measure, judge(d), d, parts=parts if len(parts) > 1 else ())


def _kcache_near(run: Run) -> Iterator[Finding]:
    for name, m in run.methods.items():
        own = m.alone("kcache")
        if run.full and own and 64 <= own["n"] <= 128 and own["device_layers"]:
            yield from _compare(run, name, run.full, near)


def _kcache_layers(run: Run) -> Iterator[Finding]:
    found = {name: own for name, m in run.methods.items() if (own := m.alone("kcache"))}
    for name, own in found.items():
        bare = next((x for x, other in found.items() if other == {**own, "device_layers": 0}), None)
        if own["device_layers"] and bare:
            yield from _compare(run, name, bare)


def _specache_1(run: Run) -> Iterator[Finding]:
    return _specache(run, 1)


def _specache_2(run: Run) -> Iterator[Finding]:
    return _specache(run, 2)


def _specache(run: Run, width: int) -> Iterator[Finding]:
    """Beside KIVI with the same codes and as many exact rows, if there is one (the paper, section 4.1)."""
    codes = ("bits", "group", "one_bit")
    kivi = {name: own for name, m in run.methods.items() if (own := m.alone("kivi"))}
    for name, m in run.methods.items():
        own = m.alone("specache")
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
        for other, base in run.methods.items():
            if base.part("kvcrush") is None and base.parts and base.without("kvcrush") == m.without("kvcrush"):
                for f in _compare(run, name, other):
                    yield f if f.verdict == SHOWN else dataclasses.replace(f, text=f"{f.text}; {FEW_BITS}")


def _far(recent: int) -> Value:
    """Mean score of the needles that more than `recent` tokens follow."""

    def value(record: Record) -> float | None:
        if not any(word in record["task"] for word in ("niah", "needle")):
            return None
        depths = [a.get("depth", record.get("about", {}).get("depth")) for a in record.get("asks", [])]
        length = record.get("tokens") or summary.length_of(record) or 0
        pairs = zip(depths, record["scores"], strict=False)
        far = [s for depth, s in pairs if depth is not None and (1 - depth) * length > recent]
        return float(np.mean(far)) if far else None

    return value


def _streaming(run: Run) -> Iterator[Finding]:
    rivals = [name for name, m in run.methods.items() if not any(map(m.part, BESIDE_A_WINDOW))]
    for name, m in run.methods.items():
        own = m.part("streaming_llm")
        if own is None:
            continue
        recent = own["recent"]
        gaps = {x: d for x in rivals if (d := run.difference(x, name, _far(recent)))}
        if gaps:
            lowest = min(gaps, key=lambda x: gaps[x].mean)
            measure = f"score, needles with more than {recent:,} tokens after them"
            found = _found(lowest, name, measure, better(gaps[lowest]), gaps[lowest])
            yield dataclasses.replace(found, subject=f"{lowest}, the next lowest, beside {name}")


def _eviction_later(run: Run) -> Iterator[Finding]:
    for name, d in _later(run, lambda m: m.traits.evicts):
        assert run.full is not None
        yield _found(name, run.full, LATER, better(dataclasses.replace(d, mean=-d.mean)), d)  # a loss is expected


def _offloading_later(run: Run) -> Iterator[Finding]:
    for name, d in _later(run, lambda m: m.traits.host and not m.traits.evicts):
        assert run.full is not None
        yield _found(name, run.full, LATER, near(d), d)


def _later(run: Run, kind: Callable[[Known], bool]) -> Iterator[tuple[str, Difference]]:
    """Methods of a kind, and how much more than the exact one they keep for later questions of a conversation."""
    for name, m in run.methods.items():
        if run.full and kind(m) and (d := run.difference(name, run.full, kept_later)):
            yield name, d


CLAIMS: tuple[Claim, ...] = (
    Claim("KCache with 64 to 128 values is near full", "full; kcache:n=64,device_layers=1", _kcache_near),
    Claim("KCache gains from first layers on the device", "kcache:n=64,device_layers=0", _kcache_layers),
    Claim("SpeCache is better than KIVI at 1 bit", "kivi:bits=1; specache:bits=1", _specache_1),
    Claim("SpeCache is better than KIVI at 2 bits", "kivi:bits=2; specache:bits=2", _specache_2),
    Claim(
        "KVCrush is better than its base at equal budget", "snapkv:budget=256; snapkv:budget=256 + kvcrush", _kvcrush
    ),
    Claim("StreamingLLM is worst at far needles", "streaming_llm:recent=252, and the task niah", _streaming),
    Claim("Eviction loses on later questions", "full; snapkv:budget=256, and turns", _eviction_later),
    Claim("Offloading does not", "full; offload, and turns", _offloading_later),
)


def check(rows: Sequence[Row], records: Iterable[Record]) -> list[Finding]:
    """One finding per claim, pair of methods and measure that the run has; NOT_RUN names what a claim still needs."""
    run = Run(records)
    shown = {r["method"] for r in rows}
    run.methods = {name: m for name, m in run.methods.items() if name in shown}
    found: list[Finding] = []
    for claim in CLAIMS:
        held = [dataclasses.replace(f, claim=claim.text) for f in claim.look(run)]
        found += held or [Finding(claim.text, claim.needs, "", NOT_RUN)]
    return found
