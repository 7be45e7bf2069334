"""Several processes that run one program on the devices of all of them: how they start, agree, and end.

Every process runs the same calls in the same order, as computations over devices of several processes need. JAX joins
them (`jax.distributed`), on CPUs with gloo. The processes exchange values through the key-value store of JAX's
coordinator, which is the first process; an exchange neither compiles nor touches a device.

A process that is gone ends the others. Each process reports to the coordinator once a second. When one stops reporting,
a computation between devices that fails raises `ProcessLost`; a process that waits in a computation ends with one line
on stderr and exit status 1.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from typing import Any

import jax

from kvjax.errors import KvjaxError, ProcessLost

START_TIMEOUT_SECONDS = 120
LOST_AFTER_SECONDS = 40
"""Seconds without a report after which a process counts as lost. A thread of Python reports, and code that keeps all
threads waiting for so long, as a C extension can, would look like a process that hangs."""

HEARTBEAT_TIMEOUT_SECONDS = 55  # JAX's own, by which it aborts the process: later than ours, which has a message
REPORT_SECONDS = 1.0
GRACE_SECONDS = 4.0  # for an error of several processes to be reported by each before any of them takes others along
MAX_TEXT, SHOWN = 1_000_000, 60  # characters of a value that are compared, and that an error shows
# Words in the errors of computations between processes: those of gloo (on CPUs), NCCL and the coordinator.
CONNECTION_ERRORS = re.compile(
    r"gloo|nccl|heartbeat|coordination service|connection (closed|reset|refused)|socket closed", re.IGNORECASE
)

_run: _Run | None = None  # a process takes part in one run, as JAX can be initialized once


def initialize(
    coordinator: str | None = None,
    process: str | tuple[int, int] | None = None,
    *,
    start_timeout_seconds: float = START_TIMEOUT_SECONDS,
    lost_after_seconds: float = LOST_AFTER_SECONDS,
) -> None:
    """Makes this process one of several, whose devices then form one list, `jax.devices()`.

    Call it before anything asks JAX for a device. A program that has called `jax.distributed.initialize` itself may
    call this afterwards, for the errors when a process is lost.

    Args:
      coordinator: host:port of the first process; None to ask SLURM, Open MPI, Kubernetes or the TPU pod, as
        `jax.distributed.initialize` does.
      process: number of this process, from 1, and how many there are: "1/2" or (1, 2).
      start_timeout_seconds: seconds to wait for all processes to start.
      lost_after_seconds: seconds after which a process that no longer reports is taken for lost, at most 50.

    Raises:
      KvjaxError: the address or the number cannot be read, the coordinator or a process does not answer in time, or
        the processes run different versions of kvjax or JAX.
    """
    global _run
    if _run is not None:
        raise KvjaxError("the processes have been initialized already; call kvjax.processes.initialize once")
    if not 2 <= lost_after_seconds <= 50:
        raise KvjaxError(f"lost_after_seconds={lost_after_seconds} is outside 2..50; JAX itself ends processes later")
    index, count = parse_process(process) if process is not None else (None, None)
    if (coordinator is None) != (process is None):
        raise KvjaxError(
            "a run started by hand needs both, the coordinator's host:port and the process as 1/2; leave both out "
            "where SLURM, Open MPI, Kubernetes or a TPU pod starts the processes"
        )
    if not jax.distributed.is_initialized():
        deadline = time.monotonic() + start_timeout_seconds
        if coordinator is not None and index:
            _wait_for_port(coordinator, deadline, start_timeout_seconds)
        elif coordinator is not None:
            _parse_address(coordinator)
        if not jax.config.values["jax_cpu_collectives_implementation"]:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # JAX takes SIGTERM for the notice of a preemption otherwise, and a process would no longer end by it.
        jax.config.update("jax_enable_preemption_service", False)
        _connect(coordinator, index, count, deadline, start_timeout_seconds)
    from jax._src import distributed  # the store of the coordinator has no public name; orbax reads it there as well

    state = distributed.global_state
    _run = _Run(
        state.client, state.process_id, state.num_processes, state.coordinator_address or "", lost_after_seconds
    )
    _run.start()
    import kvjax

    require_agreement(kvjax=kvjax.__version__, JAX=jax.__version__)


def parse_process(process: str | tuple[int, int]) -> tuple[int, int]:
    """Reads the number of a process, "1/2" or (1, 2): its index from 0, and the number of processes."""
    numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", process) if isinstance(process, str) else None
    number, count = map(int, numbers.groups()) if numbers else process if isinstance(process, tuple) else (0, 0)
    if not 1 <= number <= count:
        raise KvjaxError(f"process {process!r} must be a number and a count: 1/2 for the first of two, up to 2/2")
    return number - 1, count


def is_started_by_a_cluster() -> bool:
    """Returns whether SLURM or Open MPI has started this process as one of several."""
    counts = os.environ.get("SLURM_STEP_NUM_TASKS", ""), os.environ.get("OMPI_COMM_WORLD_SIZE", "")
    return any(x.isdecimal() and int(x) > 1 for x in counts)


def process_index() -> int:
    """Index of this process from 0; asks no device, unlike `jax.process_index`."""
    return 0 if _run is None else _run.index


def process_count() -> int:
    """Number of processes of the run, 1 for a process on its own."""
    return 1 if _run is None else _run.count


def process_name(index: int | None = None) -> str:
    """Names a process, by default this one, as errors do: "process 1 of 2"."""
    return f"process {(process_index() if index is None else index) + 1} of {process_count()}"


def is_writer() -> bool:
    """Returns whether this process is the one that writes files and prints results."""
    return process_index() == 0


def gather(value: Any) -> list[Any]:
    """Returns the values of all processes, in their order; each process must call it.

    Args:
      value: anything that JSON holds. Lists come back for tuples.

    Raises:
      ProcessLost: where a process has ended without reaching this call.
    """
    return [value] if _run is None or _run.count == 1 else [json.loads(x) for x in _run.exchange(json.dumps(value))]


def broadcast(value: Any) -> Any:
    """Returns the first process's value in all processes; each process must call it, and only the first value counts.

    Args:
      value: anything that JSON holds, such as a list of work.

    Raises:
      ProcessLost: where a process has ended without reaching this call.
    """
    return gather(value if is_writer() else None)[0]


def require_agreement(**what: Any) -> None:
    """Raises KvjaxError, in all processes, unless all gave equal values; each process must call it.

    Args:
      **what: values by their names in the error. They are compared by a digest of their `repr`.
    """
    if process_count() == 1:
        return
    # An object's address, as in the `repr` of a function, differs between processes.
    texts = {name: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for name, value in what.items()}
    every = gather({name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()})
    differing = [name for name in sorted({name for x in every for name in x}) if len({x.get(name) for x in every}) > 1]
    if not differing:
        return
    # The texts themselves are exchanged where they are needed, and shown from shortly before they part.
    every = gather({name: texts.get(name, "nothing")[:MAX_TEXT] for name in differing})
    problems = []
    for name in differing:
        start = max(0, len(os.path.commonprefix([x[name] for x in every])) - SHOWN // 2)
        processes: dict[str, list[str]] = {}
        for i, values in enumerate(every):
            text = values[name][start:]
            part = f"{'..' if start else ''}{text[:SHOWN]}{'..' if len(text) > SHOWN else ''}"
            processes.setdefault(part, []).append(str(i + 1))
        sides = [f"{part} in process {', '.join(numbers)}" for part, numbers in processes.items()]
        problems.append(f"{name.replace('_', ' ')} is {' and '.join(sides)}")
    raise KvjaxError(
        f"the {process_count()} processes disagree: {'; '.join(problems)}; start all of them with the same command, "
        "model and version"
    )


def lost_process(error: BaseException) -> ProcessLost | None:
    """Returns the error to raise in place of a computation's error if a process of the run was lost, else None."""
    if _run is None or _run.count == 1 or not CONNECTION_ERRORS.search(str(error)):
        return None
    return ProcessLost(_run.find_lost())


def end_after_error(error: BaseException, status: int) -> None:
    """Ends a process of several at once, after an error that it has printed; a process on its own goes on.

    JAX would wait at the end for the other processes, and abort. The others end with this error's message.
    """
    if _run is not None and _run.count > 1:
        is_lost = isinstance(error, ProcessLost)
        _run.leaving.acquire()
        _run.leave("lost" if is_lost else "failed", str(error) or type(error).__name__, 1 if is_lost else status)


def _parse_address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise KvjaxError(f"the coordinator must be host:port, such as 10.0.0.1:1234, got {coordinator!r:.80}")
    return host.strip("[]"), int(port)


def _wait_for_port(coordinator: str, deadline: float, seconds: float) -> None:
    """Waits until the coordinator accepts connections: JAX would abort the process where it does not."""
    host, port = _parse_address(coordinator)
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as e:
            if time.monotonic() > deadline:
                raise KvjaxError(
                    f"the coordinator {coordinator} does not answer within {seconds:g} s ({e}): start process 1 on "
                    "that host, give all processes its address, and open the port between the hosts"
                ) from e
        time.sleep(0.2)


def _connect(coordinator: str | None, index: int | None, count: int | None, deadline: float, seconds: float) -> None:
    """Runs `jax.distributed.initialize` for as long as the deadline leaves."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            # JAX aborts the process at its own timeout, so that this one is too long to be reached.
            jax.distributed.initialize(
                coordinator,
                count,
                index,
                initialization_timeout=86_400,
                heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
            )
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    where = "the coordinator that the cluster names" if coordinator is None else f"the coordinator {coordinator}"
    numbers = "" if count is None else f" of {count}"
    if thread.is_alive():
        atexit.register(os._exit, 1)  # the thread waits in JAX for good, and would abort the process at its end
        raise KvjaxError(
            f"the processes did not find each other at {where} within {seconds:g} s: start all of them with one "
            f"address, each with its own number{numbers}, and open the port between the hosts"
        )
    if failures:
        e = failures[0]
        if "before any JAX" in str(e):
            raise KvjaxError("initialize the processes before anything else: JAX has looked at its devices") from e
        if coordinator is None:
            raise KvjaxError(
                f"no cluster was found that starts the processes ({e}); start them by SLURM, Open MPI, Kubernetes or "
                "on a TPU pod, or by hand with the coordinator's host:port and the process as 1/2"
            ) from e
        raise KvjaxError(f"{where} cannot be started or reached ({e}); take a port that is free on its host") from e


@dataclasses.dataclass
class _Run:
    """This process in a run of several: its reports to the coordinator, and those of the others."""

    client: Any  # of the coordinator's key-value store
    index: int
    count: int
    coordinator: str
    lost_after_seconds: float
    num_exchanges: int = 0
    # By process: a count of reports, "ended", or a reason after "failed " or "lost ".
    reports: dict[int, str] = dataclasses.field(default_factory=dict)
    silent_ticks: dict[int, int] = dataclasses.field(default_factory=dict)
    num_rounds: int = 0  # in which the coordinator answered
    num_failures: int = 0  # rounds in a row that it refused
    stopping: threading.Event = dataclasses.field(default_factory=threading.Event)
    leaving: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    own_state: str = ""  # the last report of this process
    is_coordinator_lost: bool = False
    is_aborting: bool = False
    abort_handler: Any = None

    def start(self) -> None:
        """Starts to report, to watch the others, and to end in order."""
        if self.count == 1:
            return
        for target in (self._report, self._watch):
            threading.Thread(target=target, daemon=True).start()
        atexit.register(self._end_in_order)  # before JAX's own, which was registered first
        hook = sys.excepthook

        def tell_others(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self.leaving.acquire()  # waits for good where another thread ends the process already
            hook(kind, error, trace)
            lost = error if isinstance(error, ProcessLost) else lost_process(error)
            if lost is not None and lost is not error:
                print(f"kvjax: {lost}", file=sys.stderr)
            self.leave("failed" if lost is None else "lost", f"{kind.__name__}: {error}" if lost is None else str(lost))

        sys.excepthook = tell_others
        # JAX aborts the process as soon as the coordinator is gone, in a thread of its own that nothing can stop.
        self.abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)
        ctypes.CDLL(None).signal(signal.SIGABRT, self.abort_handler)

    def exchange(self, text: str) -> list[str]:
        """Returns the texts of all processes."""
        self.num_exchanges += 1
        folder = f"kvjax/exchange/{self.num_exchanges}"
        try:
            self.client.key_value_set(f"{folder}/{self.index}", text)
            return [self._wait_for(f"{folder}/{i}", i) for i in range(self.count)]
        except jax.errors.JaxRuntimeError as e:
            raise ProcessLost(self.find_lost()) from e

    def _wait_for(self, key: str, index: int) -> str:
        while True:
            is_over = not self.reports.get(index, "0").isdecimal()
            try:
                return self.client.blocking_key_value_get(key, 2000)
            except jax.errors.JaxRuntimeError as e:
                if "DEADLINE" not in str(e):
                    raise
            if is_over:
                raise ProcessLost(self.find_lost())

    def find_lost(self) -> str:
        """Says which process was lost, after a moment in which it fails to report."""
        start, began = {i: self.silent_ticks.get(i, 0) for i in self.reports}, time.monotonic()
        while True:
            if self.num_failures >= 2 or self.is_coordinator_lost:
                return self._describe(0)
            for i, report in self.reports.items():
                if i != self.index and not report.isdecimal() and report != "ended":
                    return self._describe(i)
            for i, ticks in self.silent_ticks.items():
                if i != self.index and ticks >= start.get(i, 0) + 3:
                    return self._describe(i)
            # On a busy machine a tick takes longer than its second. An abort ends the process with its own message.
            waited, ended = time.monotonic() - began, [i for i, report in self.reports.items() if report == "ended"]
            if waited > (5 if ended else 20) * REPORT_SECONDS and not self.is_aborting:
                return self._describe(ended[0] if ended else None)
            time.sleep(REPORT_SECONDS / 4)

    def _describe(self, index: int | None) -> str:
        """The error for a lost process."""
        who = "a process of the run" if index is None else process_name(index)
        report = "" if index is None else self.reports.get(index, "")
        kind, _, reason = ("" if index == 0 and self.is_coordinator_lost else report).partition(" ")
        goes_on = f"; {process_name(self.index)} cannot go on without it: see its output and start all processes again"
        if kind == "lost":
            return reason + goes_on
        what = {"failed": f"ended with an error: {reason}", "ended": "ended before the others"}.get(
            kind, "was lost: it died, hangs, or cannot be reached"
        )
        if index == 0:
            who += ", the coordinator,"
        return f"{who} {what}{goes_on}; what was recorded is kept"

    def leave(self, kind: str, message: str, status: int = 1) -> None:
        """Reports the end to the others, and ends the process without JAX's wait for them.

        The caller holds `leaving`, so that other threads that want to leave wait for the end of the process.
        """
        reason = " ".join(message.split()).partition(f"; {process_name(self.index)} cannot go on")[0]
        self.own_state = f"{kind} {reason[:1000]}"

        def say() -> None:
            self.client.key_value_set(f"kvjax/report/{self.index}", self.own_state, allow_overwrite=True)

        if not self.is_coordinator_lost:
            _within(2.0, say)
        if self.index == 0:  # the others end at once when their coordinator does, and have their own errors to tell
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline and self._are_others_working():
                time.sleep(0.1)
        _within(1.0, sys.stdout.flush)
        _within(1.0, sys.stderr.flush)
        os._exit(status)

    def _are_others_working(self) -> bool:
        return any(
            x.isdecimal() and self.silent_ticks.get(i, 0) < 3 for i, x in self.reports.items() if i != self.index
        )

    def _end_by_message(self, message: str) -> None:
        """Ends the process from a thread that does not compute: the one that does may wait for the lost process."""
        self.leaving.acquire()
        os.write(2, f"kvjax: {message}\n".encode())
        self.leave("lost", message)

    def _report(self) -> None:
        number = 0
        while not self.stopping.is_set():
            number += 1
            try:
                own = self.own_state or str(number)
                self.client.key_value_set(f"kvjax/report/{self.index}", own, allow_overwrite=True)
                entries = self.client.key_value_dir_get("kvjax/report/")
                self.reports = {int(key.rpartition("/")[2]): report for key, report in entries}
                self.num_rounds, self.num_failures = self.num_rounds + 1, 0
            except jax.errors.JaxRuntimeError:
                self.num_failures += 1
            self.stopping.wait(REPORT_SECONDS)

    def _watch(self) -> None:
        # Ticks are counted and no clock is read, so that a process that was stopped itself accuses nobody.
        known, known_rounds, refused_ticks, failed_ticks = {}, 0, 0, 0
        while not self.stopping.wait(REPORT_SECONDS):
            refused_ticks = 0 if self.num_rounds > known_rounds else refused_ticks + 1
            known_rounds, reports = self.num_rounds, self.reports
            if refused_ticks >= self.lost_after_seconds or self.num_failures >= 5:
                self.is_coordinator_lost = True
                self._end_by_message(self._describe(0))
            for i, report in reports.items():
                if refused_ticks:  # nothing was heard of anybody, which says nothing of this process
                    continue
                is_silent = report.isdecimal() and known.get(i) == report
                self.silent_ticks[i] = self.silent_ticks.get(i, 0) + 1 if is_silent else 0
                if i != self.index and self.silent_ticks[i] >= self.lost_after_seconds:
                    self._end_by_message(self._describe(i))
            known = dict(reports)
            failed = [i for i, x in reports.items() if i != self.index and x.startswith(("failed", "lost"))]
            failed_ticks = failed_ticks + 1 if failed else 0
            if failed_ticks > GRACE_SECONDS / REPORT_SECONDS:
                self._end_by_message(self._describe(failed[0]))

    def _end_in_order(self) -> None:
        """Waits until all processes have ended their work, while a lost one still ends the others."""
        self.own_state = "ended"
        try:
            self.client.wait_at_barrier("kvjax/end", 86_400_000)
        except jax.errors.JaxRuntimeError:
            self._end_by_message(self.find_lost())
        self.stopping.set()

    def _on_abort(self, _: int) -> None:
        """Ends with the message of a lost coordinator where that is the reason of an abort."""
        ctypes.CDLL(None).signal(signal.SIGABRT, None)
        self.is_aborting = True
        if self.index and not _within(2.0, lambda: self.client.key_value_dir_get("kvjax/report/")):
            self.is_coordinator_lost = True
            self._end_by_message(self._describe(0))
        self.is_aborting = False
        if self.leaving.locked():  # another thread reports an error already
            time.sleep(2 * GRACE_SECONDS)


def _within(seconds: float, fun: Any) -> bool:
    """Returns whether a call returned in time and without an error; a call that hangs is left in its thread."""
    done = []

    def run() -> None:
        try:
            fun()
            done.append(True)
        except Exception:  # the process ends all the same
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(done)
