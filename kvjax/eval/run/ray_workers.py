"""Workers on a Ray cluster: one actor for each device runs cells, and this process alone writes.

An actor loads the model once and keeps it, with its compiled programs, from cell to cell and from run to run. A worker
that dies is replaced and its cell is tried again; a cell that fails ends the run, as it does in one process. What a
worker is given does not depend on how many there are, so that its records do not either.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import math
import os
import platform
import re
import secrets
import socket
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from kvjax.cache.protocol import KVMethod
from kvjax.errors import KvjaxError, KvjaxWarning
from kvjax.eval.run.cell_queue import CellQueue
from kvjax.eval.run.cells import Cell, CellRunner
from kvjax.eval.run.machine import cores, machine, version
from kvjax.models.checkpoint import is_checkpoint
from kvjax.models.model import Model, load
from kvjax.registry.sources import MethodSources, load_sources, pack_sources
from kvjax.registry.strings import parse
from kvjax.utils import arguments, display
from kvjax.utils.files import expand_user
from kvjax.utils.keywords import checks_keywords
from kvjax.utils.packages import import_optional

RETRIES = 3  # of a cell whose worker died, and of a worker that dies as it starts
PLACE_SECONDS = 300.0  # that Ray may take to start an actor, on a cluster whose devices others use
PROBE_SECONDS = 5.0  # that a cluster's address may take to answer
WAIT_SECONDS = 1.0  # between two looks at workers that have nothing to tell
HANG_SECONDS, HANG_FACTOR = 600.0, 20.0  # after which, and as many times the longest call, a worker counts as dead
BYTES_PER_WORKER = 2**30  # of a process on a CPU, besides twice the model's parameters

Report = Callable[[Cell, str, list[dict[str, Any]]], None]
"""Takes a cell, one of its methods, and their records."""

Show = Callable[[int, str, int, int], None]
"""Takes a worker's number, what it does, and how many methods of its cell are done, of how many."""


@dataclasses.dataclass(frozen=True)
class ModelSetup:
    """The model that a worker loads, and the digest by which it knows that it is the driver's."""

    path: str  # absolute, or the name of a model
    dtype: str
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """A run's methods and options, as they travel."""

    methods: tuple[str | bytes, ...]  # strings, and pickled values that no string makes
    hashes: Mapping[str, str]  # by name, in order
    sources: tuple[MethodSources, ...]
    question_aware: bool
    seed: int


class Worker:
    """Runs cells in a process of its own; Ray makes an actor of it.

    Args:
      kind: of its device: "cpu", "gpu" or "tpu".
      sharers: workers on its node that share the processor's cores with it; 1 leaves it all of them.
      directory: the driver's, which relative paths in methods refer to.
    """

    def __init__(self, kind: str, sharers: int, directory: str):
        self._kind, self._sources = kind, ()
        if sharers > 1:
            # XLA reads this as it starts. Otherwise each worker would have a thread on every core.
            os.environ["NPROC"] = str(max(cores() // sharers, 1))
        if kind == "cpu":
            jax.config.update("jax_platforms", "cpu")
        with contextlib.suppress(OSError):
            os.chdir(directory)
        warnings.simplefilter("ignore", KvjaxWarning)  # the driver gives them all

    def identify(self) -> tuple[str, int]:
        """Returns the host and the process id, as soon as the process runs."""
        return platform.node(), os.getpid()

    def start(self, setup: ModelSetup) -> dict[str, Any]:
        """Loads the model; returns what must be equal on all workers, and the machine.

        Raises:
          KvjaxError: the checkpoint is not here, it is another one, or JAX does not find the device.
        """
        if (found := jax.default_backend()) != self._kind:
            raise KvjaxError(
                f"Ray gives this worker a {self._kind}, and JAX finds only a {found}; install JAX for it on every "
                "node, or start Ray there without it (ray start --num-gpus=0)"
            )
        if os.path.isabs(setup.path) and not is_checkpoint(Path(setup.path)):
            raise KvjaxError(
                f"there is no checkpoint {setup.path} on this node; copy it to the same path on every node, or put it "
                "in a folder that all nodes share"
            )
        self._model = load(setup.path, dtype=setup.dtype)
        if self._model.fingerprint != setup.fingerprint:
            raise KvjaxError(
                f"{setup.path} has other weights on this node than where the command runs; copy the checkpoint again"
            )
        versions = {name: version(name) for name in ("kvjax", "jax", "jaxlib")}
        return {"equal": {"device": jax.devices()[0].device_kind, **versions}, "machine": machine()}

    def prepare(self, run: RunSetup) -> None:
        """Makes ready for a run's cells; raises KvjaxError for a method that is not the driver's here."""
        if run.sources != self._sources:
            load_sources(run.sources)
            self._sources = run.sources
        cloudpickle = importlib.import_module("ray.cloudpickle")
        methods = [m if isinstance(m, str) else cloudpickle.loads(m) for m in run.methods]
        self._runner = CellRunner(self._model, methods, question_aware=run.question_aware, seed=run.seed)
        for name, text in zip(run.hashes, run.methods, strict=True):
            # A pickled value brings its classes with it, and not their source, which the hash reads.
            if isinstance(text, str) and self._runner.hashes.get(name) != run.hashes[name]:
                raise KvjaxError(
                    f"{name!r} is another method here than where the command runs: its code, a table that it reads or "
                    "the version of kvjax differs; install the same version on every node, and copy tables there"
                )
        self._runner.hashes |= run.hashes

    def run(self, cell: Cell, name: str) -> list[dict[str, Any]]:
        """Runs one method of a cell, and returns its records."""
        return self._runner.run_method(cell, name)


@dataclasses.dataclass(eq=False)
class _Slot:
    """A place for a worker on a node, which a new one takes when the worker dies."""

    index: int
    node: str  # Ray's id
    actor: Any = None
    stage: str = ""  # of the call that `ref` is the result of: "identify", "start", "prepare", "run"; "" without one
    ref: Any = None
    place: str = ""  # the host and the process, once known
    start_deaths: int = 0  # since its last worker was ready
    since: float = 0.0  # when the worker was asked for, or its present cell
    run_id: int = -1  # of the run that it was prepared for
    cell: Cell | None = None
    methods: list[str] = dataclasses.field(default_factory=list)  # of the cell, those that are left

    def __str__(self) -> str:
        return f"worker {self.index + 1}{self.place and f' ({self.place})'}"


@checks_keywords
@contextlib.contextmanager
def connect_ray(
    address: str, num_workers: int | None = None, announce: Callable[[str], None] | None = None
) -> Iterator[RayWorkers]:
    """Connects to a Ray cluster, or starts one on this machine; its workers end with the block.

    It wants to be called before JAX computes anything, so that the driver leaves accelerators to the workers and Ray
    forks no process with threads. From then on this process computes on its CPU.

    Args:
      address: "local" starts a cluster here, "auto" finds the one that this machine belongs to (`ray start`), and
        "HOST:PORT" is the address of its head.
      num_workers: how many workers; by default one for each GPU or TPU, and on a cluster without them one for each
        CPU whose memory holds the model.
      announce: called with a line about each worker that dies.

    Raises:
      KvjaxError: Ray is missing, the cluster does not answer, or it has devices of several kinds.
    """
    if not isinstance(address, str) or not re.fullmatch(r"auto|local|[^\s/:]+:\d{1,5}", address):
        raise KvjaxError(
            f"a Ray cluster is 'local', 'auto' or HOST:PORT, the address of its head such as 10.0.0.5:6379, got "
            f"{address!r:.80}"
        )
    if num_workers is not None:
        arguments.integer("workers", num_workers)
    # Ray reads these as it is imported. It counts its users, gives advice and logs much unless told not to.
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if address != "local":
        settings["RAY_NUM_REDIS_GET_RETRIES"] = "2"  # of half a minute each, for what listens there and is no Ray
    elif "ray" not in sys.modules:
        # Any user of this machine could run code through its ports, and a token in the environment is in no file.
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    ray = import_optional("ray", "--ray needs", "ray")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        options |= {"address": "local", "include_dashboard": False, "num_cpus": max(num_workers or 0, cores())}
        options["object_store_memory"] = 2**28  # cells and records are small, and Ray would take a third of the memory
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            options |= {"num_gpus": 0, "resources": {"TPU": 0}}
    else:
        options["address"] = _find_address(address)
    is_ours = not ray.is_initialized()
    if not is_ours and address != "auto":
        raise KvjaxError(f"this process is connected to Ray already: give 'auto' in place of {address!r}")
    workers = None
    with _silence():
        try:
            if is_ours:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the fork, which comes before JAX has threads, and of Ray's own
                    _call_ray(address, lambda: ray.init(**options))
            workers = RayWorkers(ray, num_workers, announce)
            yield workers
        finally:
            if workers is not None:
                workers.stop()
            if is_ours:
                ray.shutdown()


def connect_if_asked(
    address: str | None, num_workers: int | None = None, announce: Callable[[str], None] | None = None
) -> contextlib.AbstractContextManager[RayWorkers | None]:
    """Returns `connect_ray` for the options `--ray` and `--workers`, or an empty context without `--ray`."""
    if address is None:
        if num_workers is not None:
            raise KvjaxError("--workers is how many workers --ray has; add --ray local, or leave --workers out")
        return contextlib.nullcontext()
    return connect_ray(address, num_workers, announce)


def _find_address(address: str) -> str:
    """The HOST:PORT of a cluster that answers: Ray itself would wait for ten minutes for one that does not."""
    if address == "auto":
        services = importlib.import_module("ray._private.services")
        found = _call_ray(address, lambda: services.canonicalize_bootstrap_address_or_die("auto"))
    else:
        found = address
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_SECONDS).close()
    except (OSError, OverflowError) as e:
        raise KvjaxError(
            f"no Ray cluster answers at {found} ({e}); start one with `ray start --head` and give the address that it "
            "prints, or use --ray local"
        ) from e
    return found


def _call_ray(address: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as e:  # Ray ends the process where its version or Python's differ
        first_line = (str(e).strip().splitlines() or [type(e).__name__])[0]
        remedy = "start one with `ray start --head`, with the same versions of Python and Ray, or use --ray local"
        if address == "local":
            remedy = "the logs in /tmp/ray/session_latest/logs say why; `ray stop` ends what an earlier one has left"
        raise KvjaxError(f"no Ray cluster at {address!r}: {first_line:.300}; {remedy}") from e


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps Ray's own messages about dead workers off the progress bars: `RayWorkers` says what matters of them."""
    worker: Any = importlib.import_module("ray._private.worker")
    before = getattr(worker, "print_to_stdstream", None)  # not public, so that it may go
    if before is not None:
        worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        if before is not None:
            worker.print_to_stdstream = before


class RayWorkers:
    """The workers of a cluster that `connect_ray` has reached.

    Args:
      ray: the module, connected.
      num_workers: as `connect_ray` takes it.
      announce: called with a line about each worker that dies.

    Raises:
      KvjaxError: the devices are of several kinds, or fewer than the workers that are asked for.
    """

    def __init__(self, ray: Any, num_workers: int | None, announce: Callable[[str], None] | None):
        self._ray, self._num_workers, self._say = ray, num_workers, announce or (lambda line: None)
        errors = ray.exceptions
        # The errors that a dead worker or node leaves behind. An error of the worker's own is a RayTaskError.
        self._deaths = (
            errors.RayActorError,
            errors.ActorUnschedulableError,
            errors.ObjectLostError,
            errors.NodeDiedError,
            errors.WorkerCrashedError,
            errors.OutOfMemoryError,
        )
        nodes = self._alive_nodes()
        kinds = [kind for kind in ("gpu", "tpu") if any(n["Resources"].get(kind.upper()) for n in nodes)]
        self.kind = kinds[0] if kinds else "cpu"
        types = sorted({r for n in nodes for r in n["Resources"] if r.startswith("accelerator_type:")})
        if len(kinds) > 1 or (self.kind == "gpu" and len(types) > 1):
            found = ", ".join(types or kinds)
            raise KvjaxError(
                f"the cluster has devices of several kinds ({found}), under which records differ; run on nodes of one"
            )
        self._total = sum(map(self._capacity, nodes))
        if not self._total or (num_workers or 0) > self._total:
            devices = display.count(self._total, self.kind.upper())
            raise KvjaxError(f"--workers asks for {num_workers or 1}, and the cluster has {devices}")
        if self.kind != "cpu":
            jax.config.update("jax_platforms", "cpu")
            if jax.default_backend() != "cpu":
                raise KvjaxError(
                    f"this process holds a {jax.default_backend()} that a worker needs; call connect_ray before "
                    "anything is computed, or start Python with JAX_PLATFORMS=cpu"
                )
        self._slots: list[_Slot] = []
        self._is_for_speed = False
        self._model: ModelSetup | None = None
        self._run: RunSetup | None = None
        self._run_id = 0
        self._equal: dict[str, Any] = {"kvjax": version("kvjax"), "jax": version("jax"), "jaxlib": version("jaxlib")}
        self._machine: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def load(self, model: Model) -> dict[str, Any]:
        """Has every worker load a model, and compares it with this process's.

        Returns:
          The fields of run.json that the workers know: the kind of their device, and the first one's machine.

        Raises:
          KvjaxError: a worker cannot load it, has other weights, versions or another kind of device, or dies again
            and again as it starts; the model lies on a mesh, or in no checkpoint.
        """
        if model.mesh is not None:
            raise KvjaxError("a worker holds its model on one device: load the model without a mesh, or leave Ray out")
        if not model.name:
            raise KvjaxError("workers load the model by its name or path: use one from kvjax.load, or leave Ray out")
        where = expand_user(model.name)
        path = str(where.resolve()) if is_checkpoint(where) else model.name
        setup = ModelSetup(path, model.dtype.name, model.fingerprint)
        if setup != self._model:
            self.stop()
        self._model, self._model_bytes = setup, sum(x.nbytes for x in jax.tree.leaves(model.params))
        self._start_workers(for_speed=False)
        return {"device": self._equal["device"], "machine": self._machine}

    def run(
        self,
        cells: Sequence[Cell],
        methods: Mapping[str, KVMethod],
        hashes: Mapping[str, str],
        shape: Callable[[Cell], Hashable],
        report: Report,
        show: Show,
        *,
        question_aware: bool,
        seed: int,
    ) -> None:
        """Runs cells; those that measure speed last, on workers that have a node to themselves.

        Args:
          cells: in the order of their records.
          methods: all methods of the run by name.
          hashes: of the methods.
          shape: what the programs of a cell are compiled for.
          report: takes the records of a cell and a method as soon as they are there.
          show: called as a worker begins a method of its cell, or has none.
          question_aware: as in `evaluate`.
          seed: as in `evaluate`.

        Raises:
          KvjaxError: a method fails on a cell, as `CellRunner.run_method` says; a cell's worker died four times; or
            no worker is left.
        """
        cloudpickle = importlib.import_module("ray.cloudpickle")
        travels: list[str | bytes] = []
        for name, method in methods.items():
            try:
                is_string = parse(name) == method
            except KvjaxError:
                is_string = False
            travels.append(name if is_string else cloudpickle.dumps(method))
        sources = tuple(pack_sources(methods))
        if self._run is not None and sources != self._run.sources:
            self.stop()  # a name is registered once in a process
        self._run = RunSetup(tuple(travels), dict(hashes), sources, question_aware, seed)
        for for_speed in (False, True):
            wanted = [cell for cell in cells if cell.is_speed == for_speed]
            if wanted:
                self._start_workers(for_speed)
                self._run_id += 1
                self._run_cells(CellQueue(wanted, shape), report, show)

    def stop(self) -> None:
        """Ends all workers."""
        for slot in self._slots:
            with contextlib.suppress(Exception):
                self._ray.kill(slot.actor, no_restart=True)
        self._slots = []

    def _alive_nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _capacity(self, node: Mapping[str, Any]) -> int:
        return int(node["Resources"].get(self.kind.upper(), 0))

    def _start_workers(self, for_speed: bool) -> None:
        """Starts the workers, unless they run already, and waits until they have loaded the model."""
        if self._slots and self._is_for_speed == for_speed:
            return
        self.stop()
        self._is_for_speed = for_speed
        capacities = {}
        for node in sorted(self._alive_nodes(), key=lambda node: node["NodeID"]):
            capacity = self._capacity(node)
            if self.kind == "cpu" and self._num_workers is None:
                # A node whose memory holds one model gets one worker, whatever its cores.
                most = node["Resources"].get("memory", math.inf) // (2 * self._model_bytes + BYTES_PER_WORKER)
                capacity = int(min(capacity, max(most, 1)))
            # Speed that is measured beside another worker is that of half a machine.
            capacities[node["NodeID"]] = min(capacity, 1) if for_speed else capacity
        rounds = ((node, i) for i in range(max(capacities.values(), default=0)) for node in capacities)
        places = [node for node, i in rounds if i < capacities[node]][: self._num_workers]
        self._slots = [_Slot(i, node) for i, node in enumerate(places)]
        self._sharers = collections.Counter(places)
        for slot in list(self._slots):
            self._launch(slot)
        while any(slot.ref is not None for slot in self._slots):
            for slot in self._ready_slots():
                self._receive(slot)

    def _launch(self, slot: _Slot) -> None:
        """Asks Ray for the worker of a slot, on its node, or on another one with room if that has died."""
        nodes = {node["NodeID"]: node for node in self._alive_nodes()}
        if slot.node not in nodes:
            taken = collections.Counter(other.node for other in self._slots if other is not slot)
            room = [name for name, node in nodes.items() if taken[name] < self._capacity(node)]
            if not room:
                self._slots.remove(slot)
                if not self._slots:
                    raise KvjaxError("no node with a device is left in the cluster; what was done before is kept")
                return
            slot.node = room[0]
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        needs = {
            "cpu": {"num_cpus": 1},
            "gpu": {"num_cpus": 0, "num_gpus": 1},
            "tpu": {"num_cpus": 0, "resources": {"TPU": 1}},
        }
        actor_class = self._ray.remote(Worker).options(
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(slot.node, soft=False),
            **needs[self.kind],
        )
        # On an accelerator the processor's cores have little to do.
        sharers = self._sharers[slot.node] if self.kind == "cpu" else 1
        slot.actor, slot.place = actor_class.remote(self.kind, sharers, os.getcwd()), ""
        slot.stage, slot.ref, slot.since = "identify", slot.actor.identify.remote(), time.monotonic()
        slot.run_id, slot.cell, slot.methods = -1, None, []

    def _ready_slots(self) -> list[_Slot]:
        """Waits a while for the results of workers' calls, and returns the slots that have one."""
        waiting = {slot.ref: slot for slot in self._slots if slot.ref is not None}
        ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=WAIT_SECONDS)
        for slot in waiting.values():
            if slot.stage == "identify" and not ready and time.monotonic() - slot.since > PLACE_SECONDS:
                raise KvjaxError(
                    f"Ray has started no {slot} within {PLACE_SECONDS:.0f} s: its devices are in use (`ray status` "
                    "says by what); free them, or give a smaller --workers"
                )
        return [waiting[ref] for ref in ready]

    def _receive(self, slot: _Slot, is_hung: bool = False) -> Any:
        """Takes the result of a slot's call and makes the next one of its start; returns None for a worker that died.

        A worker that hangs, as a stopped process does, counts as dead.

        Raises:
          KvjaxError: the call failed, or the worker differs from the others.
        """
        stage, ref = slot.stage, slot.ref
        slot.stage, slot.ref = "", None
        if is_hung:
            self._bury(slot, stage, TimeoutError())
            return None
        try:
            result = self._ray.get(ref)
        except self._deaths as e:
            # Ray has no class of its own for an actor whose module cannot be imported on its node.
            if "creation task" in str(e) or "ModuleNotFoundError" in str(e):
                last_line = str(e).strip().splitlines()[-1].strip()
                raise KvjaxError(
                    f"{slot} cannot start: {last_line:.300}; install the same version of kvjax on every node"
                ) from e
            self._bury(slot, stage, e)
            return None
        except self._ray.exceptions.RayTaskError as e:
            if stage == "discard":
                return None
            cause = e.cause if isinstance(e.cause, Exception) else e
            where = "" if stage == "run" else f"{slot}: "
            if isinstance(cause, KvjaxError):
                raise KvjaxError(f"{where}{cause}") from e
            first_line = (str(cause).strip().splitlines() or [""])[0]
            raise KvjaxError(f"{where or f'{slot}: '}{stage} failed ({type(cause).__name__}: {first_line:.300})") from e
        if stage == "identify":
            host, process = result
            slot.place = f"process {process} on {host}"
            slot.stage, slot.ref = "start", slot.actor.start.remote(self._model)
        elif stage == "start":
            equal, self._machine = result["equal"], self._machine or result["machine"]
            for name, value in equal.items():
                if self._equal.setdefault(name, value) != value:
                    raise KvjaxError(
                        f"{slot} has {name} {value}, and the others have {self._equal[name]}, under which records "
                        "differ; run on nodes with devices of one kind and with the same versions"
                    )
        elif stage == "prepare":
            slot.run_id, slot.start_deaths = self._run_id, 0
        return result

    def _bury(self, slot: _Slot, stage: str, error: Exception) -> None:
        """Replaces a worker that died; one that dies again and again as it starts is left out, unless it is the last.

        Raises:
          KvjaxError: it is the last one, or no node is left.
        """
        with contextlib.suppress(Exception):  # one that only cannot be reached must not go on beside its successor
            self._ray.kill(slot.actor, no_restart=True)
        if stage != "run":
            slot.start_deaths += 1
            times = f"{slot} died {slot.start_deaths} times as it started"
            if slot.start_deaths > RETRIES and len(self._slots) == 1:
                raise KvjaxError(
                    f"{times}; its node may lack memory for as many workers: give a smaller --workers. Ray's words: "
                    f"{_first_sentence(error)}"
                ) from error
            if slot.start_deaths > RETRIES:
                # Its node may have died without Ray's knowledge yet, or lack memory for as many workers.
                self._slots.remove(slot)
                self._say(f"{times}; the run goes on with {display.count(len(self._slots), 'worker')}")
                return
            self._say(f"{slot} died as it started; another one takes its place")
        self._launch(slot)

    def _run_cells(self, queue: CellQueue, report: Report, show: Show) -> None:
        for slot in self._slots:
            if slot.stage in ("prepare", "run"):  # of a run that ended by an error
                slot.stage, slot.cell = "discard", None
        deaths: collections.Counter[int] = collections.Counter()
        longest = 0.0
        while True:
            for slot in self._slots:
                if slot.ref is not None:
                    continue
                if slot.run_id != self._run_id:
                    slot.stage, slot.ref = "prepare", slot.actor.prepare.remote(self._run)
                    continue
                if slot.cell is None and (cell := queue.take(slot.index)) is not None:
                    slot.cell, slot.methods = cell, list(cell.methods)
                if slot.cell is not None:
                    slot.stage, slot.ref = "run", slot.actor.run.remote(slot.cell, slot.methods[0])
                    slot.since = time.monotonic()
                    num_methods = len(slot.cell.methods)
                    doing = f"{slot.methods[0]}: {slot.cell.task}"
                    show(slot.index, doing, num_methods - len(slot.methods), num_methods)
            if not len(queue) and not any(slot.cell for slot in self._slots):
                return
            ready = self._ready_slots()
            limit = time.monotonic() - max(HANG_SECONDS, HANG_FACTOR * longest)
            old = [slot for slot in self._slots if slot.stage == "run" and slot.since < limit and slot not in ready]
            hung = [slot for slot in old if not self._ray.wait([slot.ref], num_returns=1, timeout=0)[0]]
            for slot in [*ready, *hung]:
                stage, cell, methods, actor, name = slot.stage, slot.cell, slot.methods, slot.actor, str(slot)
                seconds = time.monotonic() - slot.since
                result = self._receive(slot, is_hung=slot in hung)
                if slot.actor is not actor:
                    queue.forget_worker(slot.index)
                if stage != "run" or cell is None:
                    continue
                if result is not None:
                    longest, method = max(longest, seconds), methods.pop(0)
                    if not methods:
                        slot.cell = None
                        show(slot.index, "", len(cell.methods), len(cell.methods))
                    report(cell, method, result)
                    continue
                deaths[cell.index] += 1
                what = f"{display.count(len(cell.batch.cases), 'case')} of {cell.task}, {methods[0]}"
                if deaths[cell.index] > RETRIES:
                    raise KvjaxError(
                        f"cell {cell.index} ({what}) ended {deaths[cell.index]} workers, the last of them {name}; "
                        "what was done before is kept. A smaller --batch with another --out takes less memory"
                    )
                end = f"did not answer for {seconds:.0f} s" if slot in hung else "died"
                again = f"time {deaths[cell.index]} of {RETRIES}"
                self._say(f"{name} {end}; cell {cell.index} ({what}) is tried again, {again}")
                queue.put_back(dataclasses.replace(cell, methods=tuple(methods)))


def _first_sentence(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
