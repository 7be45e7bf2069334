"""A run's work as cells: a batch of cases under a group of methods, which one process runs by itself.

A batch's exact keys and values are read once for all methods of its group, so the two belong together wherever they
run: in this process, in another one, or on another machine. Cells depend on the cases, the methods and the options
alone, and not on the records that exist, so that every process that is given the same run makes the same list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvjax.cache.protocol import KVMethod
from kvjax.core.mesh import RULES
from kvjax.errors import KvjaxError, ProcessLost
from kvjax.eval.run import harness
from kvjax.eval.run.context_reader import ContextReader
from kvjax.eval.tasks.case import Case
from kvjax.eval.tasks.metrics import METRICS
from kvjax.models.model import Model
from kvjax.processes import lost_process
from kvjax.registry.method_hash import method_hash
from kvjax.registry.strings import Methods, is_builtin_method, resolve

SPEED = "speed"
GROUP_METHODS = 16  # methods that take a batch one after the other, and so share its exact keys and values
DECODE_TOKENS = 16  # tokens of a prompt that are read in about the time of one decoding step


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


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """A batch of cases under a group of methods: one piece of a run's work, which pickles.

    `dataclasses.replace(cell, methods=..)` is the same cell for some of its methods, as after a run that was stopped.
    """

    index: int  # its place in the list of the run's cells, which is the order of the records
    batch: Batch
    methods: tuple[str, ...]  # names of the methods that take the batch, in order

    @property
    def task(self) -> str:
        """The task of its cases."""
        return self.batch.cases[0].task

    @property
    def is_speed(self) -> bool:
        """Whether it measures speed, which wants a machine of its own, and no records that repeat bit for bit."""
        return self.task == SPEED

    def count_tokens(self, question_aware: bool) -> int:
        """Counts the tokens that each of its methods reads, a decoded one as `DECODE_TOKENS`: a measure of its work."""
        if self.is_speed:
            length = int(self.batch.cases[0].about["length"])
            return harness.SPEED_RUNS * self.batch.batch_size * (length + DECODE_TOKENS * harness.SPEED_TOKENS)
        total = 0
        for case in self.batch.padded_cases:
            num_reads = len(case.asks) if question_aware and not case.turns else 1
            total += num_reads * len(case.context) + (0 if case.follows is None else len(case.follows))
            total += sum(len(a.prompt) + DECODE_TOKENS * self.batch.max_new_tokens for a in case.asks)
        return total


def make_cells(cases: Sequence[Case], methods: Sequence[str], batch: int, speed: Sequence[int] = ()) -> list[Cell]:
    """Divides a run into cells, in the order in which one process runs them.

    Args:
      cases: the cases of all tasks.
      methods: their names, in order.
      batch: contexts at a time.
      speed: context lengths, in tokens, at which speed is measured; each is a cell for every group of methods.
    """
    # Speed is measured on random tokens, so that its case has nothing but a length.
    speed_cases = [Case(SPEED, f"{SPEED}/{n}", np.zeros(0, np.int32), about={"length": n}) for n in speed]
    batches = [*make_batches(cases, batch), *(Batch((case,), batch, 0) for case in speed_cases)]
    groups = [tuple(methods[start : start + GROUP_METHODS]) for start in range(0, len(methods), GROUP_METHODS)]
    return [Cell(i, b, group) for i, (group, b) in enumerate((group, b) for group in groups for b in batches)]


class CellRunner:
    """Runs cells under a model; the exact keys and values of its latest contexts are kept from one to the next.

    Args:
      model: from `kvjax.load`.
      methods: all methods of the run, values or strings; a cell names those that it wants.
      question_aware: whether each question ends the prompt.
      seed: of the contexts of speed measurements.
    """

    def __init__(self, model: Model, methods: Methods, *, question_aware: bool = False, seed: int = 0):
        self.model, self.reader = model, ContextReader(model)
        self.methods = resolve(methods)
        self.hashes = {name: method_hash(method) for name, method in self.methods.items()}
        self._question_aware, self._seed = question_aware, seed

    def run(self, cell: Cell) -> list[dict[str, Any]]:
        """Runs a cell, and returns its records: each method's, in the order of its cases.

        Raises:
          KvjaxError: a method fails on the batch; the message names both.
        """
        return [record for name in cell.methods for record in self.run_method(cell, name)]

    def run_method(self, cell: Cell, name: str) -> list[dict[str, Any]]:
        """Runs one method of a cell, and returns one record per case; raises KvjaxError as `run` does."""
        method, batch = self.methods[name], cell.batch
        with name_failures(f"{name} on {cell.task}"):
            if cell.is_speed:
                records = [run_speed_test(self.model, name, method, batch, self._seed)]
            else:
                records = run_batch(self.reader, name, method, batch, self._question_aware)
        return [record | {"method_hash": self.hashes[name]} for record in records]


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


@contextlib.contextmanager
def name_failures(where: str) -> Iterator[None]:
    """Turns any error into one line with the place and a remedy."""
    try:
        yield
    except Exception as e:
        lost = e if isinstance(e, ProcessLost) else lost_process(e)
        if lost is not None:  # neither the method nor the task is at fault
            raise lost from e
        first_line = (str(e).splitlines() or [""])[0][:300]
        is_out_of_memory = isinstance(e, MemoryError) or "RESOURCE_EXHAUSTED" in str(e)
        remedy = "use a smaller --batch with another --out" if is_out_of_memory else "leave this method or task out"
        failed = f" failed ({type(e).__name__}: {first_line}). What was done before is kept; {remedy}"
        raise KvjaxError(where + (f": {e}" if isinstance(e, KvjaxError) else failed)) from e


def run_batch(
    reader: ContextReader,
    name: str,
    method: KVMethod,
    batch: Batch,
    question_aware: bool,
) -> list[dict[str, Any]]:
    """Runs a batch under a method, and returns one record per case."""
    cases, mesh = batch.padded_cases, reader.model.mesh
    if mesh is not None:  # its devices get equally many
        cases += cases[-1:] * (-len(cases) % mesh.shape.get(RULES["B"], 1))
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
    each, longest = size.per_sequence(len(cases)), max(len(c.context) for c in batch.cases)
    bfloat16 = harness.describe_bytes(method, reader.model.config, longest)
    # A report may be made where a user's own method is not known, and then only the record can tell its traits.
    traits = {} if is_builtin_method(name) else {"traits": dataclasses.asdict(method.traits)}
    return [
        {
            "method": name,
            "task": c.task,
            "key": c.key,
            "case": fingerprint(c),
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
