"""An estimate of how long a run will take: the seconds of the work that is left, from those of the work done.

Work is divided into what scales differently. Exact keys are read once for all methods; compressing them and decoding
take each method its own time; and a program is compiled once for a method and a shape. What was measured for a method
and a task counts; what was not is taken from the other methods and tasks that were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from kvjax.eval.run.context_reader import ContextReader, ReadingTime, padded_width
from kvjax.eval.run.harness import SPEED_RUNS, SPEED_TOKENS
from kvjax.eval.tasks.case import Case
from kvjax.generation.timing import compile_seconds
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.utils import display

ANNOUNCED_FRACTION = 0.2  # of the run after which an estimate is announced, though some methods have not run yet
SHORTEST_SECONDS = 10.0  # of a run whose length is announced
END_FRACTION = 0.6  # seconds of tables, plots and the page, as a fraction of those before the work began
CHANGED_FRACTION = 0.25  # of an estimate's change after which it is announced again
DECODE_FLOPS = 16  # tokens read in the time of one decoding step, as long as no step was measured


@dataclasses.dataclass(frozen=True)
class Step:
    """The sizes of a batch of cases that decide how long a method takes over it."""

    task: str
    kind: str  # "answers", "text" or "speed"
    num_cases: int
    num_reads: int  # prompts that are read for each context
    batch_size: int
    width: int  # padded tokens of a prompt
    amount: int  # answers: steps of decoding; text: tokens that follow; speed: steps of decoding in each run

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes that programs are compiled for."""
        return self.batch_size, self.width, self.amount


def make_step(cases: Sequence[Case], batch_size: int, max_new_tokens: int, question_aware: bool) -> Step:
    """Describes a batch of cases; without questions and a text that follows, it measures speed."""
    case = cases[0]
    if case.follows is not None:
        width = padded_width(max(len(c.context) for c in cases))
        amount = padded_width(max(len(c.follows) for c in cases if c.follows is not None))
        return Step(case.task, "text", len(cases), 1, batch_size, width, amount)
    if not case.asks:
        length = int(case.about["length"])
        return Step(case.task, "speed", len(cases), SPEED_RUNS, batch_size, padded_width(length), SPEED_TOKENS)
    ends_prompt = case.turns or question_aware
    width = max(len(c.context) + (len(c.asks[0].prompt) if ends_prompt else 0) for c in cases)
    num_reads = len(case.asks) if question_aware and not case.turns else 1
    amount = len(case.asks) * max_new_tokens
    return Step(case.task, "answers", len(cases), num_reads, batch_size, padded_width(width), amount)


@dataclasses.dataclass(frozen=True)
class _Measured:
    """Seconds of a step under a method, without compilation but for the last three fields."""

    step: Step
    method: str
    exact: float  # reading the exact keys
    compress: float
    rest: float  # asking, decoding, scoring
    exact_compile: float
    compress_compile: float
    rest_compile: float


class TimeEstimate:
    """Measures the work of a run while it goes on, and predicts the rest.

    Args:
      model: the model.
      work: steps and methods in the order in which they run.
      reader: reads the contexts.
      announce: called with a line that says how long the run will take, as soon as that is known, and again where it
        has changed by more than a quarter.
      other_seconds: what was done before the work, such as loading the model.
    """

    def __init__(
        self,
        model: Model,
        work: Sequence[tuple[Step, str]],
        reader: ContextReader,
        announce: Callable[[str], None] | None = None,
        other_seconds: float = 0.0,
    ):
        self._work, self._done, self._reader, self._announce = work, 0, reader, announce
        self._steps: dict[tuple[Step, str], _Measured] = {}
        self._config, self._weights = model.config, weights_per_token(model)
        self._start, self._announced, self._left = time.perf_counter() - other_seconds, 0.0, 0.0
        self._end_seconds = END_FRACTION * other_seconds

    @contextlib.contextmanager
    def measure_step(self) -> Iterator[None]:
        """Measures the next step of the work."""
        step, method = self._work[self._done]
        start, compiled, self._reader.time = time.perf_counter(), compile_seconds(), ReadingTime()
        yield
        seconds, compiled, read = time.perf_counter() - start, compile_seconds() - compiled, self._reader.time
        rest = max(seconds - compiled - read.exact - read.compress, 0.0)
        before = self._steps.get((step, method))
        compiled = max(compiled - read.exact_compile - read.compress_compile, 0.0)
        reading = read.exact_compile, read.compress_compile
        now = _Measured(step, method, read.exact, read.compress, rest, *reading, compiled)
        if before:
            # Steps of one size are one measurement, in which the latest ones count most; only the first compiles.
            means = {name: (getattr(before, name) + getattr(now, name)) / 2 for name in ("compress", "rest")}
            now = dataclasses.replace(before, exact=now.exact or before.exact, **means)
        self._steps[step, method] = now
        self._done += 1
        self._left = self._predict()
        self._announce_changes()

    def _predict(self) -> float:
        """Predicts the seconds of the work that is left."""
        left, before = 0.0, self._work[self._done - 1][0]
        known: dict[tuple[Step, str], float] = {}
        compiled = {part for step, method in self._steps for part in _compiled_parts(step, method)}
        has_exact = any(m.exact for m in self._steps.values())  # else every method reads for itself
        for step, method in self._work[self._done :]:
            if step is not before and step.kind != "speed" and has_exact:
                left += self._exact_rate() * self._read_flops(step)
            if (step, method) not in known:
                known[step, method] = self._method_seconds(step, method)
            left += known[step, method]
            for part in _compiled_parts(step, method) - compiled:
                left += self._compile_seconds(part[0], step, method)
                compiled.add(part)
            before = step
        return left

    def describe_left(self) -> str:
        """Returns how long the rest takes, in words."""
        return f"about {format_seconds(self._left)} left" if self._done < len(self._work) else ""

    def _announce_changes(self) -> None:
        elapsed = time.perf_counter() - self._start
        total = elapsed + self._left + self._end_seconds
        is_known = {method for _, method in self._steps} >= {method for _, method in self._work}
        if self._announce is None or self._done == len(self._work) or total < SHORTEST_SECONDS:
            return
        if self._announced:
            is_due = abs(total - self._announced) > CHANGED_FRACTION * self._announced
        else:
            is_due = is_known or elapsed > ANNOUNCED_FRACTION * total
        if is_due:
            now = "now " if self._announced else ""
            methods = display.count(len({method for _, method in self._work}), "method")
            tasks = display.count(len({step.task for step, _ in self._work}), "task")
            cases = display.count(sum(step.num_cases for step, _ in self._work), "case")
            self._announce(
                f"{now}about {format_seconds(total)} in all, of which {format_seconds(elapsed)} have passed, for "
                f"{methods}, {tasks} and {cases}"
            )
            self._announced = total

    def _read_flops(self, step: Step, num_tokens: int | None = None) -> float:
        return count_read_flops(self._config, self._weights, step, num_tokens)

    def _exact_rate(self) -> float:
        """Seconds per unit of work of reading, from the exact reads, or from whole reads where those are not kept."""
        found = [m for m in self._steps.values() if m.step.kind != "speed"]
        reads = [m for m in found if m.exact] or found
        work = sum(self._read_flops(m.step) for m in reads)
        return sum(m.exact or m.compress for m in reads) / work if work else 0.0

    def _method_seconds(self, step: Step, method: str) -> float:
        """Predicts a method's own work over a step, as it was measured at steps like this one."""
        read = self._read_flops(step)
        compress_rate = self._likeliest(
            ("answers", "text"), step, method, lambda m: m.compress / self._read_flops(m.step)
        )
        compress = read * (compress_rate or 0.0)
        if step.kind == "text":
            rate = self._likeliest(("text",), step, method, lambda m: m.rest / self._read_flops(m.step, m.step.amount))
            rate = self._exact_rate() if rate is None else rate  # a text is read as a prompt is
            return compress + rate * self._read_flops(step, step.amount)
        decode = self._likeliest(("answers",), step, method, lambda m: m.rest / m.step.amount)
        if decode is None:
            decode = DECODE_FLOPS * self._exact_rate() * read / (step.num_reads * step.width * step.batch_size)
        if step.kind == "answers":
            return compress + decode * step.amount
        speed = self._exact_rate() * read + compress + SPEED_RUNS * SPEED_TOKENS * decode
        # Where nothing but speed has run, its seconds stand for reading.
        return speed or read * (
            self._likeliest(("speed",), step, method, lambda m: m.rest / self._read_flops(m.step)) or 0
        )

    def _likeliest(
        self, kinds: Sequence[str], step: Step, method: str, value: Callable[[_Measured], float]
    ) -> float | None:
        """The mean of a value over the measurements most like a step: of its method and task, its method, or all."""
        found = [m for m in self._steps.values() if m.step.kind in kinds]
        own = [m for m in found if m.method == method]
        same = [m for m in own if m.step.task == step.task]
        return _mean(map(value, same or own or found)) if found else None

    def _compile_seconds(self, part: str, step: Step, method: str) -> float:
        """Compilation of a part of a step, as at the first shapes of the same kind and method, if there were any."""
        found = [m for m in self._steps.values() if getattr(m, part)]
        kind = [m for m in found if m.step.kind == step.kind]
        own = [m for m in kind or found if m.method == method]
        return _mean(getattr(m, part) for m in own or kind or found)


def _compiled_parts(step: Step, method: str) -> set[tuple]:
    """The programs of a step: a field of `_Measured`, and what its program is compiled for."""
    parts = {("rest_compile", method, step.kind, step.shape)}
    if step.kind != "speed":
        size = step.batch_size, step.width
        parts |= {("exact_compile", *size), ("compress_compile", method, *size)}
    return parts


def format_seconds(seconds: float) -> str:
    """Returns a time in words, as exactly as an estimate is: "40 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    if seconds < 600:
        minutes, rest = divmod(round(seconds / 10) * 10, 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _mean(values) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def count_read_flops(config: Config, num_weights: int, step: Step, num_tokens: int | None = None) -> int:
    """Counts the work of reading the prompts of a step, or `num_tokens` more of each context.

    Args:
      config: the model's.
      num_weights: its `weights_per_token`.
      step: the sizes of a batch.
      num_tokens: tokens that follow each context, in place of the prompts.

    Returns:
      Multiplications of a token's vector with weights and with keys and values.
    """
    tokens = step.num_reads * step.width if num_tokens is None else num_tokens
    # A token meets every weight once, and on average half of the prompt's keys and values.
    kinds = [config.kind(i).attention for i in range(config.layers)]
    pairs = sum(a.heads * (a.head_dim + a.value_dim) for a in kinds) * step.width
    attention = pairs // 2 if num_tokens is None else pairs
    return step.batch_size * tokens * (num_weights + attention)


def weights_per_token(model: Model) -> int:
    """Counts the weights that a token meets on its way through the layers."""
    total = sum(x.size for x in jax.tree.leaves(model.params))
    return max(total - model.config.vocab_size * model.config.width, 1)
