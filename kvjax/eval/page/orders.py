"""The orders that the papers let one expect, checked on a run: differences between methods with their errors.

Both methods of a comparison saw the same cases, so differences are taken case by case, averaged per task and length,
and then over these; the error is that of this mean, for fixed tasks and random cases.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvjax.cache.hold.codecs import Plain
from kvjax.cache.hold.groups import Kivi
from kvjax.cache.method import Method
from kvjax.cache.read.readers import Full, TopV
from kvjax.core.types import KvjaxError
from kvjax.eval.page import summary
from kvjax.eval.page.summary import Record, Row
from kvjax.methods.h2o import H2O
from kvjax.methods.kvcrush import KVCrush
from kvjax.methods.scissorhands import Scissorhands
from kvjax.methods.specache import Speculative
from kvjax.methods.streaming_llm import StreamingLLM
from kvjax.methods.strings import parse

SHOWN, NOT_SHOWN, WITHIN, NOT_RUN = "shown", "not shown", "within the error", "not in this run"
NEAR = 0.02  # a loss below this, in score or in bits per byte, counts as near
FEW_BITS = "it has one bit per query head to tell tokens apart, few on a model of few heads (the paper's: 32)"
ERRORS = 2  # standard errors that a difference has to exceed


@dataclasses.dataclass(frozen=True)
class Difference:
    """`mean` = `left` - `right`, its standard error (None with a single case), and over how many cases."""

    mean: float
    error: float | None
    left: float
    right: float
    cases: int


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


class Run:
    """The records of a run by method and case, and its methods as values."""

    def __init__(self, records: Iterable[Record]):
        kept = [r for r in summary.latest(records) if r["task"] != summary.SPEED]
        self.cases: dict[str, dict[tuple, Record]] = {}
        for r in kept:
            self.cases.setdefault(r["method"], {})[r["task"], summary.length_of(r) or 0, r["key"]] = r
        parsed = {name: _method(name) for name in self.cases}
        self.methods: dict[str, Any] = {name: m for name, m in parsed.items() if m is not None}

    @property
    def full(self) -> str | None:
        """The exact method's name."""
        return next((name for name, m in self.methods.items() if m == Method()), None)

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


def _method(name: str) -> Any:
    try:
        return parse(name)
    except KvjaxError:  # a method of the user's own, known by a name only
        return None


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


def number(x: float, measure: str) -> str:
    """A value of a measure for people."""
    text = f"{abs(x):.3f}" if measure.startswith("bits") else f"{abs(100 * x):.1f}"
    return ("−" if x < 0 and float(text) else "") + text


def signed(d: Difference, measure: str) -> str:
    """Left - right as it is read (bits per byte: less is better), with its error."""
    mean = -d.mean if measure.startswith("bits") else d.mean
    error = "" if d.error is None else f" ± {number(d.error, measure)}"
    return ("+" if mean >= 0 else "") + number(mean, measure) + error


def _text(d: Difference, measure: str, verdict: str) -> str:
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


def _compare(run: Run, claim: str, a: str, b: str, judge=better, measures=MEASURES) -> Iterator[Finding]:
    for measure, value in measures:
        if d := run.difference(a, b, value):
            verdict = judge(d)
            parts = run.parts(a, b, value)
            text = _text(d, measure, verdict)
            yield Finding(claim, f"{a} beside {b}", measure, verdict, d, text, parts if len(parts) > 1 else ())


def _plain(m: Any) -> bool:
    return isinstance(m, Method) and m.select is None and m.rest is None


def _is_kcache(m: Any) -> bool:
    return _plain(m) and isinstance(m.read, TopV) and m.k == Plain()


def _kcache_near(run: Run, claim: str) -> Iterator[Finding]:
    for name, m in run.methods.items():
        if run.full and _is_kcache(m) and 64 <= m.read.n <= 128 and m.device_layers:
            yield from _compare(run, claim, name, run.full, near)


def _kcache_layers(run: Run, claim: str) -> Iterator[Finding]:
    found = {name: m for name, m in run.methods.items() if _is_kcache(m)}
    for name, m in found.items():
        bare = next((x for x, o in found.items() if o == dataclasses.replace(m, device_layers=0)), None)
        if m.device_layers and bare:
            yield from _compare(run, claim, name, bare)


def _specache(run: Run, claim: str, bits: int) -> Iterator[Finding]:
    kivi = {x: m for x, m in run.methods.items() if _plain(m) and isinstance(m.k, Kivi) and type(m.read) is Full}
    for name, m in run.methods.items():
        if not (_plain(m) and isinstance(m.read, Speculative) and m.read.k.bits == bits):
            continue
        copy, exact = m.read.k, m.read.k.residual + m.read.topk
        same = [x for x, o in kivi.items() if (o.k.bits, o.k.group, o.k.one_bit) == (bits, copy.group, copy.one_bit)]
        if same:  # with as many exact rows, if there is one (the paper, section 4.1)
            yield from _compare(run, claim, name, min(same, key=lambda x: abs(kivi[x].k.residual - exact)))


def _kvcrush(run: Run, claim: str) -> Iterator[Finding]:
    for name, m in run.methods.items():
        if isinstance(m, Method) and isinstance(m.rest, KVCrush):
            base = dataclasses.replace(m, rest=None)
            for other in (x for x, o in run.methods.items() if o == base):
                for f in _compare(run, claim, name, other):
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


def _streaming(run: Run, claim: str) -> Iterator[Finding]:
    for name, m in run.methods.items():
        if not isinstance(m, StreamingLLM):
            continue
        measure = f"score, needles with more than {m.recent:,} tokens after them"
        rivals = [x for x, o in run.methods.items() if not isinstance(o, StreamingLLM) and "sinks_and_recent" not in x]
        gaps = {x: d for x in rivals if (d := run.difference(x, name, _far(m.recent)))}
        if gaps:
            lowest = min(gaps, key=lambda x: gaps[x].mean)
            verdict, d = better(gaps[lowest]), gaps[lowest]
            text = _text(d, measure, verdict)
            yield Finding(claim, f"{lowest}, the next lowest, beside {name}", measure, verdict, d, text)


def _evicts(m: Any) -> bool:
    return isinstance(m, (StreamingLLM, H2O, Scissorhands)) or (isinstance(m, Method) and m.select is not None)


def _later(run: Run, claim: str, evicts: bool) -> Iterator[Finding]:
    for name, m in run.methods.items():
        kind = _evicts(m) if evicts else _plain(m) and m.uses_host
        d = run.difference(name, run.full, kept_later) if run.full and kind else None
        if d:  # of an evicting method a loss is expected
            verdict = better(dataclasses.replace(d, mean=-d.mean)) if evicts else near(d)
            yield Finding(claim, f"{name} beside {run.full}", LATER, verdict, d, _text(d, LATER, verdict))


CLAIMS: tuple[tuple[str, str, Callable[[Run, str], Iterator[Finding]]], ...] = (
    ("KCache with 64 to 128 values is near full", "full; kcache:n=64,device_layers=1", _kcache_near),
    ("KCache gains from first layers on the device", "kcache:n=64,device_layers=0", _kcache_layers),
    ("SpeCache is better than KIVI at 1 bit", "kivi:bits=1; specache:bits=1", lambda r, c: _specache(r, c, 1)),
    ("SpeCache is better than KIVI at 2 bits", "kivi:bits=2; specache:bits=2", lambda r, c: _specache(r, c, 2)),
    ("KVCrush is better than its base at equal budget", "snapkv:budget=256; snapkv:budget=256 + kvcrush", _kvcrush),
    ("StreamingLLM is worst at far needles", "streaming_llm:recent=252, and the task niah", _streaming),
    ("Eviction loses on later questions", "full; snapkv:budget=256, and turns", lambda r, c: _later(r, c, True)),
    ("Offloading does not", "full; offload, and turns", lambda r, c: _later(r, c, False)),
)


def check(rows: Sequence[Row], records: Iterable[Record]) -> list[Finding]:
    """One finding per claim, pair of methods and measure that the run has; NOT_RUN names what a claim still needs."""
    run = Run(records)
    known = {r["method"] for r in rows}
    run.methods = {name: m for name, m in run.methods.items() if name in known}
    found: list[Finding] = []
    for claim, needs, look in CLAIMS:
        found += list(look(run, claim)) or [Finding(claim, needs, "", NOT_RUN)]
    return found
