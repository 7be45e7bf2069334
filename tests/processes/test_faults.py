"""A process that dies, hangs or fails ends the others soon, by a named error and status 1, and by nothing after it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from kvjax import processes
from kvjax.errors import KvjaxError
from tests.processes import launch

FAULTS = {
    # What the other process sees: a signal for the process with a number, while both compute, or neither.
    "a worker is killed": (signal.SIGKILL, 2, "compute"),
    "a worker is killed between computations": (signal.SIGKILL, 2, "idle"),
    "the coordinator is killed": (signal.SIGKILL, 1, "compute"),
    "the coordinator is killed between computations": (signal.SIGKILL, 1, "idle"),
    "a worker hangs": (signal.SIGSTOP, 2, "compute"),
    "the coordinator hangs": (signal.SIGSTOP, 1, "compute"),
    "one fails": (None, 2, "error"),
}


@pytest.fixture(scope="module")
def ends() -> dict[str, tuple[int, str]]:
    """The status and the stderr of the process that is left, by fault; all faults at a time."""
    runs = {
        fault: launch.start_two("-m", "tests.processes.faults", "{coordinator}", "{process}", what)
        for fault, (_, _, what) in FAULTS.items()
    }
    found = {}
    try:
        for fault, two in runs.items():
            for process in two:
                assert process.stdout is not None
                while line := process.stdout.readline():
                    if line == "ready\n":
                        break
                assert line, process.communicate()[1]
            number, victim = FAULTS[fault][0], two[FAULTS[fault][1] - 1]
            if number is not None:
                os.kill(victim.pid, number)
        for fault, two in runs.items():
            left = two[2 - FAULTS[fault][1]]
            _, errors = left.communicate(timeout=60)
            found[fault] = left.returncode, errors
    finally:
        for process in (x for two in runs.values() for x in two):
            process.kill()
            process.communicate()
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_the_process_that_is_left_ends_by_a_named_error(ends, fault):
    status, errors = ends[fault]
    last, lost = errors.strip().splitlines()[-1], FAULTS[fault][1]
    assert status == 1, errors
    name = f"process {lost} of 2" + (", the coordinator," if lost == 1 else "")
    reason = (
        "ended with an error: KvjaxError: a file that only one process misses" if fault == "one fails" else "was lost"
    )
    assert f"{name} {reason}" in last and f"process {3 - lost} of 2 cannot go on without it" in last, errors


def test_a_coordinator_that_does_not_answer_is_named_in_time():
    start = time.monotonic()
    with pytest.raises(KvjaxError, match=r"the coordinator 127.0.0.1:\d+ does not answer within 0.5 s"):
        processes.initialize(f"127.0.0.1:{launch.free_port()}", (2, 2), start_timeout_seconds=0.5)
    assert time.monotonic() - start < 30


def test_a_coordinator_whose_others_do_not_come_says_so_in_time():
    code = "from kvjax import processes; processes.initialize('127.0.0.1:{}', '1/2', start_timeout_seconds=1)"
    process = launch.start("-c", code.format(launch.free_port()))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.strip().splitlines()[-1].startswith(
        "kvjax.errors.KvjaxError: the processes"
    )
    assert "did not find each other at the coordinator 127.0.0.1:" in errors


@pytest.mark.parametrize("process", ["0/2", "3/2", "1", "a/b", (0, 2), 7])
def test_a_number_that_is_none_is_refused(process):
    with pytest.raises(KvjaxError, match="must be a number and a count"):
        processes.parse_process(process)


def test_a_process_alone_needs_no_other():
    assert processes.gather({"a": 1}) == [{"a": 1}] and processes.broadcast([2]) == [2] and processes.is_writer()
    processes.require_agreement(method="full")
    assert processes.process_name() == "process 1 of 1" and processes.lost_process(RuntimeError("gloo")) is None


def test_tasks_of_slurm_and_open_mpi_are_recognized(monkeypatch):
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        assert not processes.is_started_by_a_cluster()
        monkeypatch.setenv(name, "1")
        assert not processes.is_started_by_a_cluster()
        monkeypatch.setenv(name, "2")
        assert processes.is_started_by_a_cluster()
        monkeypatch.delenv(name)
