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
from kvjax.models.model import Model

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
        self._config, self._weights = model.config, _weights_per_token(model)
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

    @property
    def _measurements(self) -> list[_Measured]:
        return list(self._steps.values())

    def _predict(self) -> float:
        """Predicts the seconds of the work that is left."""
        left, before, known = 0.0, self._work[self._done - 1][0], {}
        shapes = {(m.method, m.step.kind, m.step.shape) for m in self._measurements}
        exact_shapes = {(m.step.batch_size, m.step.width) for m in self._measurements}
        read_shapes = {(m.method, m.step.batch_size, m.step.width) for m in self._measurements}
        for step, method in self._work[self._done :]:
            if step is not before and step.kind != "speed":
                left += self._exact_seconds(step)
                if (step.batch_size, step.width) not in exact_shapes:
                    left += _mean(m.exact_compile for m in self._measurements if m.exact_compile)
            if (step, method) not in known:
                known[step, method] = self._compress_seconds(step, method) + self._rest_seconds(step, method)
            left += known[step, method]
            if (method, step.kind, step.shape) not in shapes:
                left += self._compile_seconds(step, method)
            if (method, step.batch_size, step.width) not in read_shapes:
                own = [m for m in self._measurements if m.method == method] or self._measurements
                left += _mean(m.compress_compile for m in own if m.compress_compile)
            shapes.add((method, step.kind, step.shape))
            read_shapes.add((method, step.batch_size, step.width))
            exact_shapes.add((step.batch_size, step.width))
            before = step
        return left

    def describe_left(self) -> str:
        """Returns how long the rest takes, in words."""
        return f"about {format_seconds(self._left)} left" if self._done < len(self._work) else ""

    def _announce_changes(self) -> None:
        elapsed = time.perf_counter() - self._start
        total = elapsed + self._left + self._end_seconds
        is_known = {m.method for m in self._measurements} >= {method for _, method in self._work}
        if self._announce is None or self._done == len(self._work) or total < SHORTEST_SECONDS:
            return
        if self._announced:
            is_due = abs(total - self._announced) > CHANGED_FRACTION * self._announced
        else:
            is_due = is_known or elapsed > ANNOUNCED_FRACTION * total
        if is_due:
            now = "now " if self._announced else ""
            self._announce(
                f"{now}about {format_seconds(total)} in all, of which {format_seconds(elapsed)} have passed, for "
                f"{describe_work(self._work)}"
            )
            self._announced = total

    def _read_flops(self, step: Step, num_tokens: int | None = None) -> float:
        """Reading the prompts of a step, in units of work; or `num_tokens` more of each context."""
        c, tokens = self._config, step.num_reads * step.width if num_tokens is None else num_tokens
        # A token meets every weight once, and on average half of the prompt's keys and values.
        attention = c.layers * c.heads * c.head_dim * step.width * (1 if num_tokens is None else 2)
        return step.batch_size * tokens * (self._weights + attention)

    def _exact_rate(self) -> float:
        """Seconds per unit of work of reading, from the exact reads, or from whole reads where those are not kept."""
        found = [m for m in self._measurements if m.step.kind != "speed"]
        reads = [m for m in found if m.exact] or found
        if not reads:
            return 0.0
        seconds = sum(m.exact or m.compress for m in reads)
        return seconds / sum(self._read_flops(m.step) for m in reads)

    def _exact_seconds(self, step: Step) -> float:
        if not any(m.exact for m in self._measurements):
            return 0.0  # every method reads for itself
        return self._exact_rate() * self._read_flops(step)

    def _compress_seconds(self, step: Step, method: str) -> float:
        if step.kind == "speed":
            return 0.0  # part of the whole run that is measured there

        def rate(m: _Measured) -> float:
            return m.compress / self._read_flops(m.step)

        return self._rate(step, method, rate, by_task=False) * self._read_flops(step)

    def _rest_seconds(self, step: Step, method: str) -> float:
        def rate(m: _Measured) -> float:
            return m.rest / self._rest_units(m.step, m.method)

        return self._rate(step, method, rate) * self._rest_units(step, method)

    def _rest_units(self, step: Step, method: str) -> float:
        """The work after reading, in steps of decoding, in units of reading, or in seconds."""
        if step.kind == "answers":
            return step.amount
        if step.kind == "text":
            return self._read_flops(step, step.amount)
        answers = [m for m in self._measurements if m.step.kind == "answers"]
        own = [m for m in answers if m.method == method] or answers
        token_seconds = self._exact_rate() * self._read_flops(step) / step.num_reads / step.width / step.batch_size
        decode = _mean(m.rest / m.step.amount for m in own) if own else DECODE_FLOPS * token_seconds
        compressed = [m for m in self._measurements if m.method == method and m.step.kind != "speed"]
        compress = _mean(m.compress / self._read_flops(m.step) for m in compressed) * self._read_flops(step)
        return self._exact_rate() * self._read_flops(step) + compress + SPEED_RUNS * SPEED_TOKENS * decode

    def _rate(self, step: Step, method: str, rate: Callable[[_Measured], float], *, by_task: bool = True) -> float:
        """The measured rate of a method on a task; or that of others, times how much slower it was elsewhere."""
        found = [m for m in self._measurements if not by_task or m.step.kind == step.kind]
        found = found if by_task else [m for m in found if m.step.kind != "speed"]
        task = {m.method: [] for m in found if not by_task or m.step.task == step.task}
        for m in found:
            if not by_task or m.step.task == step.task:
                task[m.method].append(rate(m))
        if method in task:
            return _mean(task[method])
        elsewhere = [m for m in found if m.method == method]
        if task:
            ratios = []
            for m in elsewhere:
                same = [rate(o) for o in found if o.step.task == m.step.task and o.method in task]
                ratios += [rate(m) / _mean(same)] if same and _mean(same) else []
            return _mean(_mean(rates) for rates in task.values()) * (_mean(ratios) if ratios else 1.0)
        if found:
            return _mean(rate(m) for m in elsewhere or found)
        # Nothing of the kind has run: texts are read as prompts are, and a speed's unit is a second.
        if step.kind == "answers":
            per_token = self._exact_rate() * self._read_flops(step) / step.num_reads / step.width / step.batch_size
            return DECODE_FLOPS * per_token
        return self._exact_rate() if step.kind == "text" else 1.0

    def _compile_seconds(self, step: Step, method: str) -> float:
        """Compilation of what follows reading, for a new shape: as at the first shape of the same kind."""
        first: dict[tuple, float] = {}
        for m in self._measurements:
            first.setdefault((m.method, m.step.kind, m.step.shape), m.rest_compile)
        same_method = {key: seconds for key, seconds in first.items() if key[0] == method}
        same_kind = {key: seconds for key, seconds in first.items() if key[1] == step.kind}
        both = {key: seconds for key, seconds in same_method.items() if key in same_kind}
        # The likest measurements that there are.
        return _mean((both or same_kind or same_method or first).values())


def describe_work(work: Sequence[tuple[Step, str]]) -> str:
    """Returns what a run does, in numbers."""
    methods, tasks = {method for _, method in work}, {step.task for step, _ in work}
    num_cases = sum(step.num_cases for step, _ in work)
    return f"{_count(len(methods), 'method')}, {_count(len(tasks), 'task')} and {_count(num_cases, 'case')}"


def format_seconds(seconds: float) -> str:
    """Returns a time in words, as exactly as an estimate is: "40 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    if seconds < 600:
        minutes, rest = divmod(round(seconds / 10) * 10, 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _mean(values) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def _weights_per_token(model: Model) -> int:
    """The weights that a token meets on its way through the layers."""
    total = sum(x.size for x in jax.tree.leaves(model.params))
    return max(total - model.config.vocab_size * model.config.width, 1)
