"""The launches of a step and the time predicted for each, read from a program written by hand."""

from __future__ import annotations

from experiments.bench.launches import Launch, find_launches, row
from experiments.bench.traffic import Program
from tests.experiments.bench.test_traffic import PROGRAM


def test_each_launch_counts_as_often_as_it_runs():
    launches = list(find_launches(Program.from_text(PROGRAM)))
    assert [(x.kind, x.rounds) for x in launches] == [
        ("at", 1),
        ("read", 1),
        ("written", 1),
        ("start", 1),
        ("sum", 1),
        ("back", 1),
        ("fetch", 1),
        ("twice", 5),
    ]
    assert [x.does for x in launches[1:3]] == ["dynamic-slice", "dynamic-update-slice"]
    assert launches[1].num_bytes == 32


def test_a_launch_takes_its_own_time_or_that_of_its_bytes():
    small, large = Launch("copy", "", "", 3, 10), Launch("fusion", "", "add", 1, 4_000)
    assert small.microseconds(2.5, 1e9) == 7.5
    assert large.microseconds(2.5, 1e9) == 4
    assert row("m", [small, large], 2.5, 1e9) == ["m", 4, 1, 0, 3, "0.0", "12"]
