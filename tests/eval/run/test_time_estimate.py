"""How long a run will take is predicted from the batches that have run; the clock here is a stand-in."""

import types

import numpy as np
import pytest

from kvjax.eval.run import time_estimate
from kvjax.eval.run.context_reader import ReadingTime
from kvjax.eval.run.time_estimate import Step, TimeEstimate
from kvjax.eval.tasks.case import Ask, Case
from kvjax.testing import toy_model

METHODS = ("full", "snapkv", "kvzip")
COMPRESS = dict(zip(METHODS, (0.1, 0.5, 4.0), strict=True))  # seconds of a step at 1,024 tokens
DECODE = dict(zip(METHODS, (0.05, 0.03, 0.04), strict=True))  # seconds of a step of decoding
COMPILE = 6.0  # seconds of a method at a new shape
NEEDLES = Step("niah", "answers", 8, 1, 8, 1024, 32)


class Machine:
    """Runs steps in no time, and moves the clock as if they took theirs."""

    def __init__(self, monkeypatch, slower: float = 1.0):
        self.now, self.compiled, self.slower = 0.0, 0.0, slower
        self.reader, self.seen, self.before = types.SimpleNamespace(time=ReadingTime()), set(), None
        monkeypatch.setattr(time_estimate, "time", types.SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(time_estimate, "compile_seconds", lambda: self.compiled)

    def run(self, step: Step, method: str) -> None:
        tokens = step.num_reads * step.batch_size * step.width / (8 * 1024)
        exact = 0.0 if step is self.before or step.kind == "speed" else 12.0 * tokens
        compress = 0.0 if step.kind == "speed" else COMPRESS[method] * tokens
        rest = DECODE[method] * step.amount
        if step.kind == "text":
            rest = 12.0 * step.batch_size * step.amount / (8 * 1024)
        if step.kind == "speed":
            rest = tokens * (12.0 + COMPRESS[method]) + step.num_reads * rest
        shape = (method, step.kind, step.shape)
        compiling = 0.0 if shape in self.seen else COMPILE
        self.seen.add(shape)
        self.before = step
        self.reader.time.exact += exact * self.slower
        self.reader.time.compress += compress * self.slower
        self.compiled += compiling
        self.now += (exact + compress + rest) * self.slower + compiling


def run(monkeypatch, steps, announce=None, methods=METHODS, **machine):
    """Runs steps under methods; returns the predicted seconds of the whole run after each, over the true ones."""
    world, work = Machine(monkeypatch, **machine), [(step, method) for step in steps for method in methods]
    estimate = TimeEstimate(toy_model(layers=1), work, world.reader, announce)
    predicted = []
    for step, method in work:
        with estimate.measure_step():
            world.run(step, method)
        predicted.append(world.now + estimate._left)
    assert estimate._left == 0 and estimate.describe_left() == ""
    return np.array(predicted) / world.now


def test_once_every_method_has_run_the_estimate_of_equal_batches_is_exact(monkeypatch):
    ratios = run(monkeypatch, [Step("niah", "answers", 8, 1, 8, 1024, 32) for _ in range(6)])
    np.testing.assert_allclose(ratios[2:], 1.0, atol=1e-6)
    assert 0.7 < ratios[0] < 1.3  # the others are taken to be as the first one


@pytest.mark.parametrize("slower", [0.1, 1.0, 30.0])
def test_other_tasks_lengths_and_speed_are_predicted_from_the_first_one(monkeypatch, slower):
    steps = [Step("niah", "answers", 8, 1, 8, 1024, 32), Step("turns", "answers", 8, 1, 8, 1024, 96)]
    steps += [Step("ppl", "text", 8, 1, 8, 1024, 256), Step("niah", "answers", 8, 1, 8, 2048, 32)]
    steps += [Step("speed", "speed", 1, 3, 8, 1024, 64)]
    ratios = run(monkeypatch, steps, slower=slower)
    assert np.abs(ratios[2:] - 1).max() < 0.3


def test_it_is_announced_once_all_methods_ran_or_a_fifth_of_the_run_has_passed(monkeypatch):
    lines: list[str] = []
    run(monkeypatch, [Step("niah", "answers", 8, 1, 8, 1024, 32) for _ in range(20)], lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("about ") and " in all, of which " in lines[0]
    assert lines[0].endswith("have passed, for 3 methods, 1 task and 480 cases")
    lines.clear()
    run(monkeypatch, [NEEDLES], lines.append)
    assert "of which 20 s have passed" in lines[0]


def test_a_short_run_is_not_announced(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(time_estimate, "SHORTEST_SECONDS", 1e6)
    run(monkeypatch, [NEEDLES, NEEDLES], lines.append)
    assert lines == []


def test_an_estimate_that_turns_out_wrong_is_announced_again(monkeypatch):
    lines: list[str] = []
    world, work = Machine(monkeypatch), [(NEEDLES, "full")] * 6
    estimate = TimeEstimate(toy_model(layers=1), work, world.reader, lines.append)
    for i, (step, method) in enumerate(work):
        world.slower = 1.0 if i < 2 else 20.0  # something else runs on the machine
        with estimate.measure_step():
            world.run(step, method)
    assert len(lines) >= 2 and lines[1].startswith("now about ")


def test_the_sizes_of_a_batch_are_those_that_its_methods_take():
    ask = Ask(np.zeros(5, np.int32), "exact", ("x",), 7)
    context = np.zeros(100, np.int32)
    cases = [Case("turns", "0", context, asks=(ask, ask), turns=True)] * 2
    assert time_estimate.make_step(cases, 4, 7, False) == Step("turns", "answers", 2, 1, 4, 112, 14)
    cases = [Case("niah", "0", context, asks=(ask, ask))] * 2
    assert time_estimate.make_step(cases, 4, 7, True).num_reads == 2
    assert time_estimate.make_step([Case("ppl", "0", context, follows=context[:20])], 1, 0, False).kind == "text"
    speed = Case("speed", "speed/64", context[:0], about={"length": 64})
    assert time_estimate.make_step([speed], 8, 0, False) == Step("speed", "speed", 1, 3, 8, 64, 64)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (43.4, "43 s"), (60, "1 min"), (203, "3 min 20 s"), (1500, "25 min"), (7500, "2 h 5 min")],
)
def test_times_are_said_as_exactly_as_they_are_known(seconds, words):
    assert time_estimate.format_seconds(seconds) == words
