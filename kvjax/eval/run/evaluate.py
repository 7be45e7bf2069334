"""A run: every method on every case, in batches that depend on the cases alone, recorded as it goes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.progress import Progress

from kvjax.cache.protocol import KVMethod
from kvjax.errors import KvjaxError
from kvjax.eval.run import harness, time_estimate
from kvjax.eval.run.context_reader import ContextReader
from kvjax.eval.run.store import Store
from kvjax.eval.run.time_estimate import TimeEstimate
from kvjax.eval.tasks.case import Case
from kvjax.eval.tasks.metrics import METRICS
from kvjax.generation.memory_plan import planned_bytes
from kvjax.models.model import Model
from kvjax.registry.method_hash import method_hash
from kvjax.registry.strings import Methods, is_builtin_method, resolve

SPEED = "speed"
GROUP_METHODS = 16  # methods that take a batch one after the other, and so share its exact keys and values


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Cases that run together: equally many questions, or text that follows, or one measurement of speed."""

    cases: tuple[Case, ...]
    batch_size: int  # the last batch repeats its last case up to this size, so that all batches have one shape
    max_new_tokens: int  # the most that any of the group may answer

    @property
    def padded_cases(self) -> tuple[Case, ...]:
        """The cases, `batch_size` of them."""
        return self.cases + self.cases[-1:] * (self.batch_size - len(self.cases))


def make_batches(cases: Sequence[Case], size: int) -> list[Batch]:
    """Groups cases of equal task, length and number of questions, cut evenly into batches of at most `size`.

    Inside a group contexts are sorted by length. Records that exist play no part, so a run that was killed goes on
    with the same batches, and gives the same bits.
    """
    groups: dict[Any, list[Case]] = {}
    for c in cases:
        key = (c.task, c.about.get("length"), len(c.asks), c.turns, c.follows is None)
        groups.setdefault(key, []).append(c)
    batches = []
    for group in groups.values():
        group = sorted(group, key=lambda c: len(c.context))
        # Equal batches need less padding than full ones and a small rest.
        batch_size = -(-len(group) // -(-len(group) // size))
        max_new_tokens = max((a.new_tokens for c in group for a in c.asks), default=0)
        for start in range(0, len(group), batch_size):
            batches.append(Batch(tuple(group[start : start + batch_size]), batch_size, max_new_tokens))
    return batches


def evaluate(
    model: Model,
    methods: Methods,
    cases: Sequence[Case],
    store: Store,
    *,
    batch: int = 8,
    question_aware: bool = False,
    speed: Sequence[int] = (),
    seed: int = 0,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
    other_seconds: float = 0.0,
) -> None:
    """Appends to the store one record per method and case that it lacks, a batch at a time; greedy, deterministic.

    Args:
      model: from `kvjax.load`.
      methods: values, strings, or strings separated by ";"; a string is recorded as it is, and a value under the
        string that makes it (`kvjax.name_of`).
      cases: the cases of all tasks.
      store: the records.
      batch: contexts at a time.
      question_aware: whether each question ends the prompt (`harness.ask_question_aware`); cases with `turns` are
        conversations in any case.
      speed: context lengths, in tokens, at which speed is measured.
      seed: of the contexts of speed measurements.
      progress: shows how far the run is.
      announce: called with a line that says how long the run will take, once a few batches show it.
      other_seconds: what the caller has spent before, such as on loading the model, and counts as part of the run.

    Raises:
      KvjaxError: before anything runs, for a method or case that cannot run; later, for a batch that fails. The
        records before it stay.
    """
    parsed = resolve(methods)
    check_methods(model, parsed, [len(c.context) for c in cases] + list(speed))
    check_cases(cases)
    hashes = {name: method_hash(method) for name, method in parsed.items()}
    fingerprints = {(c.task, c.key): fingerprint(c) for c in cases}
    check_records(store.records, hashes, fingerprints)
    # Speed is measured on random tokens, so that its case has nothing but a length.
    speed_cases = [Case(SPEED, f"{SPEED}/{n}", np.zeros(0, np.int32), about={"length": n}) for n in speed]
    steps = [*make_batches(cases, batch), *(Batch((case,), batch, 0) for case in speed_cases)]
    names = list(parsed)
    # All methods of a group take a batch before the next one starts: its exact keys and values are still in memory.
    groups = [names[start : start + GROUP_METHODS] for start in range(0, len(names), GROUP_METHODS)]
    pairs = ((step, name) for group in groups for step in steps for name in group)
    work = [(s, name) for s, name in pairs if not all(store.find(name, c.task, c.key) for c in s.cases)]
    reader = ContextReader(model)
    sizes = {id(s): time_estimate.make_step(s.cases, s.batch_size, s.max_new_tokens, question_aware) for s in steps}
    estimate = TimeEstimate(model, [(sizes[id(s)], name) for s, name in work], reader, announce, other_seconds)
    with Progress(disable=True) if progress is None else progress as bar:
        total = bar.add_task("all", total=sum(len(s.cases) for s, _ in work), left="")
        for (name, task), part in itertools.groupby(work, key=lambda w: (w[1], w[0].cases[0].task)):
            todo = [s for s, _ in part]
            line = bar.add_task(f"{name}: {task}", total=sum(len(s.cases) for s in todo), left="")
            for step in todo:
                with _name_failures(f"{name} on {task}"), estimate.measure_step():
                    if task == SPEED:
                        records = [run_speed_test(model, name, parsed[name], step, seed)]
                    else:
                        records = run_batch(reader, name, parsed[name], step, question_aware, fingerprints)
                store.append([record | {"method_hash": hashes[name]} for record in records])
                bar.update(total, left=estimate.describe_left())
                bar.advance(line, len(step.cases))
                bar.advance(total, len(step.cases))
            bar.remove_task(line)


@contextlib.contextmanager
def _name_failures(where: str) -> Iterator[None]:
    """Turns any error into one line with the place and a remedy."""
    try:
        yield
    except Exception as e:
        first_line = (str(e).splitlines() or [""])[0][:300]
        is_out_of_memory = isinstance(e, MemoryError) or "RESOURCE_EXHAUSTED" in str(e)
        remedy = "use a smaller --batch with another --out" if is_out_of_memory else "leave this method or task out"
        failed = f" failed ({type(e).__name__}: {first_line}). What was done before is kept; {remedy}"
        raise KvjaxError(where + (f": {e}" if isinstance(e, KvjaxError) else failed)) from e


def check_methods(model: Model, methods: Mapping[str, KVMethod], lengths: Sequence[int]) -> None:
    """Raises KvjaxError for a method that cannot run on this model with contexts of such lengths."""
    for name, method in methods.items():
        with _name_failures(f"method {name!r} cannot run on {model.name or 'this model'}"):
            # A method's limits concern the shortest or the longest context.
            for n in {min(lengths, default=1), max(lengths, default=1)}:
                planned_bytes(method, model.config, n, dtype=model.dtype)


def check_cases(cases: Sequence[Case]) -> None:
    """Raises KvjaxError for a case that is incomplete, or whose metric is unknown or lacks a package."""
    names = collections.Counter((c.task, c.key) for c in cases)
    for c in cases:
        if names[c.task, c.key] > 1:
            problem = "is made more than once; a key names one instance"
        elif (c.follows is None) == (not c.asks):
            problem = "needs either questions or a text that follows, and not both"
        elif c.follows is not None and not (c.bytes and len(c.follows)):
            problem = f"has {len(c.follows)} tokens and {c.bytes} bytes to follow; give some"
        elif unknown := [a.metric for a in c.asks if a.metric not in METRICS]:
            problem = f"asks for metric {unknown[0]!r}; there are {', '.join(METRICS)}"
        elif not all(len(a.prompt) and a.new_tokens > 0 and a.references for a in c.asks):
            problem = "has a question without prompt, tokens to answer, or reference"
        else:
            continue
        raise KvjaxError(f"case {c.key!r} {problem}")
    for a in {a.metric: a for c in cases for a in c.asks}.values():
        METRICS[a.metric]("", a)  # a missing library is named now, and not after an hour


def check_records(
    records: Iterable[Mapping[str, Any]], hashes: Mapping[str, str], fingerprints: Mapping[tuple[str, str], str]
) -> None:
    """Raises KvjaxError for a record that was made of another method, or of another case, under the same name."""
    for r in records:
        if r.get("method_hash") and r["method_hash"] != hashes.get(r["method"], r["method_hash"]):
            changed = f"{r['method']!r} is not the method that was recorded under this name: its code, values, table"
        elif fingerprints.get((r["task"], r["key"])) not in (None, r.get("case")):
            changed = (
                f"case {r['key']!r} is not the one that was recorded under this key: its questions, depths, text, data"
            )
        else:
            continue
        raise KvjaxError(f"{changed} or the version of kvjax have changed. Choose another --out, or delete the old one")


def fingerprint(case: Case) -> str:
    """Returns a digest of all that a case asks and expects."""
    arrays = [case.context, *(a.prompt for a in case.asks), *([] if case.follows is None else [case.follows])]
    total = hashlib.sha256()
    for x in arrays:
        # Without the lengths, arrays cut at other places would have the same digest.
        total.update(f"{len(x)} ".encode() + np.asarray(x, np.int32).tobytes())
    rest = [[a.metric, a.references, a.new_tokens, a.stop, a.options] for a in case.asks]
    total.update(json.dumps([rest, case.turns, case.bytes]).encode())
    return total.hexdigest()[:16]


def run_batch(
    reader: ContextReader,
    name: str,
    method: KVMethod,
    batch: Batch,
    question_aware: bool,
    fingerprints: Mapping[tuple[str, str], str],
) -> list[dict[str, Any]]:
    """Runs a batch under a method, and returns one record per case."""
    cases = batch.padded_cases
    if cases[0].follows is not None:
        bits, likeliest, size = harness.score_continuations(reader, method, cases)
        results = [
            {"scores": [], "bits": float(b.sum() / c.bytes), "likeliest": best.tolist()}
            for c, b, best in zip(batch.cases, bits, likeliest, strict=False)
        ]
    else:
        if cases[0].turns:
            ask = harness.ask_conversation
        else:
            ask = harness.ask_question_aware if question_aware else harness.ask_shared_context
        replies, size = ask(reader, method, cases, batch.max_new_tokens)
        results = [
            {
                "metric": ", ".join(dict.fromkeys(a.metric for a in c.asks)),
                "scores": [float(METRICS[a.metric](text, a)) for text, a in zip(texts, c.asks, strict=True)],
                "asks": [{"turn": i, **a.about} for i, a in enumerate(c.asks)],
                "predictions": list(texts),
            }
            for c, texts in zip(batch.cases, zip(*replies, strict=True), strict=False)
        ]
    each, longest = size.per_sequence(batch.batch_size), max(len(c.context) for c in batch.cases)
    bfloat16 = harness.describe_bytes(method, reader.model.config, longest)
    # A report may be made where a user's own method is not known, and then only the record can tell its traits.
    traits = {} if is_builtin_method(name) else {"traits": dataclasses.asdict(method.traits)}
    return [
        {
            "method": name,
            "task": c.task,
            "key": c.key,
            "case": fingerprints[c.task, c.key],
            "about": dict(c.about),
            "tokens": len(c.context),
            "turns": c.turns,
            **result,
            "bytes": each.held,
            "room": each.reserved,
            "dtype": each.dtype,
            **bfloat16,
            **traits,
        }
        for c, result in zip(batch.cases, results, strict=True)
    ]


def run_speed_test(model: Model, name: str, method: KVMethod, batch: Batch, seed: int) -> dict[str, Any]:
    """Measures speed at one length, and returns its record."""
    (case,), size = batch.cases, batch.batch_size
    length = int(case.about["length"])
    prefill, decode, cache_bytes = harness.measure_speed(model, method, length, size, seed)
    return {
        "method": name,
        "task": SPEED,
        "key": case.key,
        "case": "",
        "about": {"length": length, "batch": size},
        "tokens": length,
        "scores": [],
        "prefill_seconds": prefill,
        "tokens_per_second": decode,
        "bytes": cache_bytes.per_sequence(size).held,
        "dtype": cache_bytes.dtype,
        **harness.describe_bytes(method, model.config, length),
    }
