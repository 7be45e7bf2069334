"""Workers on a Ray cluster: one actor for each device runs cells, and this process alone writes.

An actor loads the model once and keeps it, with its compiled programs, from cell to cell and from run to run. Ray
starts an actor again whose process dies, and has it run its cell again; a node that is lost leaves its cells to the
other workers. A cell is computed as one process would compute it, so records do not depend on which worker ran it.
"""

from __future__ import annotations

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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from kvjax.cache.protocol import KVMethod
from kvjax.core.compile_cache import use_compilation_cache
from kvjax.errors import KvjaxError, KvjaxWarning
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

RETRIES, ROUNDS = 1, 2  # Ray tries a cell again whose worker dies, and what is left then is run once more
PLACE_SECONDS = 300.0  # that Ray may take to start all workers, on a cluster whose devices others use
PROBE_SECONDS = 5.0  # that a cluster's address may take to answer
BYTES_PER_WORKER = 2**30  # of a process on a CPU, besides twice the model's parameters
HOST_AND_PORT = re.compile(r"[^\s/:]+:\d{1,5}")


@dataclasses.dataclass(frozen=True)
class ModelSetup:
    """The model that a worker loads, and the digest by which it knows that it is the driver's."""

    path: str  # absolute, or the name of a model
    dtype: str
    weights: str | None
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
    """Runs cells in a process of its own; Ray makes an actor of it, and makes it again if the process dies.

    Args:
      kind: of its device: "cpu", "gpu" or "tpu".
      sharers: workers on its node that share the processor's cores with it; 1 leaves it all of them.
      directory: the driver's, which relative paths in methods refer to.
      setup: the model.
    """

    def __init__(self, kind: str, sharers: int, directory: str, setup: ModelSetup):
        self._kind, self._setup = kind, setup
        self._model: Model | None = None
        self._run: RunSetup | None = None
        if sharers > 1:
            # XLA reads this as it starts. Otherwise each worker would have a thread on every core.
            os.environ["NPROC"] = str(max(cores() // sharers, 1))
        if kind == "cpu":
            jax.config.update("jax_platforms", "cpu")
        with contextlib.suppress(OSError):
            os.chdir(directory)
        warnings.simplefilter("ignore", KvjaxWarning)  # the driver gives them all
        use_compilation_cache()  # so that workers find the programs that others have compiled

    def process_id(self) -> int:
        """Returns the process id, as soon as the process runs."""
        return os.getpid()

    def load(self) -> dict[str, Any]:
        """Loads the model; returns what must be equal on all workers, and the machine.

        Raises:
          KvjaxError: the checkpoint is missing or another one, or JAX does not find the device.
        """
        setup, node = self._setup, platform.node()
        if (found := jax.default_backend()) != self._kind:
            raise KvjaxError(
                f"Ray gives a worker on {node} a {self._kind}, and JAX finds only a {found}; install JAX for it on "
                "every node, or start Ray there without it (ray start --num-gpus=0)"
            )
        if os.path.isabs(setup.path) and not is_checkpoint(Path(setup.path)):
            raise KvjaxError(
                f"there is no checkpoint {setup.path} on {node}; copy it to the same path on every node, or put it in "
                "a folder that all nodes share"
            )
        self._model = load(setup.path, dtype=setup.dtype, weights=setup.weights)
        if self._model.fingerprint != setup.fingerprint:
            raise KvjaxError(
                f"{setup.path} has other weights on {node} than where the command runs; copy the checkpoint again"
            )
        versions = {name: version(name) for name in ("kvjax", "jax", "jaxlib")}
        return {"equal": {"device": jax.devices()[0].device_kind, **versions}, "machine": machine()}

    def run(self, run: RunSetup, cell: Cell) -> tuple[int, list[dict[str, Any]], list[str]]:
        """Runs a cell.

        Args:
          run: the run that the cell belongs to, which comes with each cell for a process that has just started.
          cell: the work.

        Returns:
          The cell's index, the records of its methods, and the errors of those that failed.

        Raises:
          KvjaxError: the model or a method is not the driver's here.
        """
        if self._model is None:
            self.load()
        if run != self._run:
            self.prepare(run)
        records, errors = [], []
        for name in cell.methods:
            try:
                records += self._runner.run_method(cell, name)
            except KvjaxError as e:
                errors.append(str(e))
        return cell.index, records, errors

    def prepare(self, run: RunSetup) -> None:
        """Loads the methods of a run; raises KvjaxError for a method that is not the driver's here."""
        assert self._model is not None  # `load` comes first
        if self._run is None:
            load_sources(run.sources)
        cloudpickle = importlib.import_module("ray.cloudpickle")
        methods = [m if isinstance(m, str) else cloudpickle.loads(m) for m in run.methods]
        self._runner = CellRunner(self._model, methods, question_aware=run.question_aware, seed=run.seed)
        for name, text in zip(run.hashes, run.methods, strict=True):
            # A pickled value brings its classes with it, and not their source, which the hash reads.
            if isinstance(text, str) and self._runner.hashes.get(name) != run.hashes[name]:
                raise KvjaxError(
                    f"{name!r} is another method on {platform.node()} than where the command runs: its code, a table "
                    "that it reads or the version of kvjax differs; install the same version on every node, and copy "
                    "tables there"
                )
        self._runner.hashes |= run.hashes
        self._run = run


@checks_keywords
@contextlib.contextmanager
def connect_ray(
    address: str, num_workers: int | None = None, announce: Callable[[str], None] | None = None
) -> Iterator[RayWorkers]:
    """Connects to a Ray cluster, or starts one on this machine; its workers end with the block.

    Call it before JAX computes anything: the driver then leaves accelerators to the workers, and Ray forks no process
    that has threads. From then on this process computes on its CPU.

    Args:
      address: "local" starts a cluster here, "auto" finds the one that this machine belongs to (`ray start`), and
        "HOST:PORT" is the address of its head.
      num_workers: how many workers; by default one for each GPU or TPU, and on a cluster without them one for each
        CPU whose memory holds the model.
      announce: called with a line about each cell that fails and each worker that is lost.

    Raises:
      KvjaxError: Ray is missing, the cluster does not answer, or it has devices of several kinds.
    """
    if address not in ("auto", "local") and not HOST_AND_PORT.fullmatch(str(address)):
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
    is_ours = not ray.is_initialized()
    if not is_ours and address != "auto":
        raise KvjaxError(f"this process is connected to Ray already: give 'auto' in place of {address!r}")
    workers = None
    try:
        if is_ours:
            _start_ray(ray, address, num_workers)
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


def _start_ray(ray: Any, address: str, num_workers: int | None) -> None:
    """Starts a cluster on this machine or connects to one; raises KvjaxError where that fails."""
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        remedy = "the logs in /tmp/ray/session_latest/logs say why; `ray stop` ends what an earlier one has left"
        options |= {"include_dashboard": False, "num_cpus": max(num_workers or 0, cores())}
        options["object_store_memory"] = 2**28  # cells and records are small, and Ray would take a third of the memory
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            options |= {"num_gpus": 0, "resources": {"TPU": 0}}
    else:
        remedy = "start one with `ray start --head`, with the same versions of Python and Ray, or use --ray local"
        named = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
        if HOST_AND_PORT.fullmatch(named):
            _check_address(named)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the fork, which comes before JAX has threads, and of Ray's own
            ray.init(**options)
    except (Exception, SystemExit) as e:  # Ray ends the process where its version or Python's differ
        first_line = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise KvjaxError(f"no Ray cluster at {address!r}: {first_line:.300}; {remedy}") from e


def _check_address(address: str) -> None:
    """Raises KvjaxError where nothing answers: Ray itself would wait for ten minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_SECONDS).close()
    except (OSError, OverflowError) as e:
        raise KvjaxError(
            f"no Ray cluster answers at {address} ({e}); start one with `ray start --head` and give the address that "
            "it prints, or use --ray local"
        ) from e


class RayWorkers:
    """The workers of a cluster that `connect_ray` has reached.

    Args:
      ray: the module, connected.
      num_workers: as `connect_ray` takes it.
      announce: called with a line about each cell that fails and each worker that is lost.

    Raises:
      KvjaxError: the devices are of several kinds, or fewer than the workers that are asked for.
    """

    def __init__(self, ray: Any, num_workers: int | None, announce: Callable[[str], None] | None):
        self._ray, self._num_workers, self._say = ray, num_workers, announce or (lambda line: None)
        nodes = self._alive_nodes()
        kinds = [kind for kind in ("gpu", "tpu") if any(n["Resources"].get(kind.upper()) for n in nodes)]
        self.kind = kinds[0] if kinds else "cpu"
        types = sorted({r for n in nodes for r in n["Resources"] if r.startswith("accelerator_type:")})
        if len(kinds) > 1 or (self.kind == "gpu" and len(types) > 1):
            found = ", ".join(types or kinds)
            raise KvjaxError(
                f"the cluster has devices of several kinds ({found}), under which records differ; run on nodes of one"
            )
        total = sum(map(self._count_devices, nodes))
        if not total or (num_workers or 0) > total:
            devices = display.count(total, self.kind.upper())
            raise KvjaxError(f"--workers asks for {num_workers or 1}, and the cluster has {devices}")
        if self.kind != "cpu":
            jax.config.update("jax_platforms", "cpu")
            if jax.default_backend() != "cpu":
                raise KvjaxError(
                    f"this process holds a {jax.default_backend()} that a worker needs; call connect_ray before "
                    "anything is computed, or start Python with JAX_PLATFORMS=cpu"
                )
        self._actors: list[Any] = []
        self._is_one_per_node = False
        self._model: ModelSetup | None = None
        self._sources: tuple[MethodSources, ...] = ()
        self._equal: dict[str, Any] = {name: version(name) for name in ("kvjax", "jax", "jaxlib")}
        self._machine: dict[str, Any] = {}

    def load(self, model: Model) -> dict[str, Any]:
        """Has every worker load a model, and compares it with this process's.

        Returns:
          The fields of run.json that the workers know: the kind of their device, and the first one's machine.

        Raises:
          KvjaxError: a worker cannot load it, or has other weights, versions or another kind of device; the model lies
            on a mesh, or in no checkpoint.
        """
        if model.mesh is not None:
            raise KvjaxError("a worker holds its model on one device: load the model without a mesh, or leave Ray out")
        if not model.name:
            raise KvjaxError("workers load the model by its name or path: use one from kvjax.load, or leave Ray out")
        where = expand_user(model.name)
        path = str(where.resolve()) if is_checkpoint(where) else model.name
        setup = ModelSetup(path, model.dtype.name, model.weights, model.fingerprint)
        if setup != self._model:
            self.stop()
        self._model, self._model_bytes = setup, sum(x.nbytes for x in jax.tree.leaves(model.params))
        self._start(one_per_node=False)
        return {"device": self._equal["device"], "machine": self._machine}

    def run(
        self,
        cells: Sequence[Cell],
        methods: Mapping[str, KVMethod],
        hashes: Mapping[str, str],
        *,
        question_aware: bool,
        seed: int,
    ) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
        """Runs cells; those that measure speed last, on workers that have a node to themselves.

        Args:
          cells: in any order.
          methods: all methods of the run by name.
          hashes: of the methods.
          question_aware: as in `evaluate`.
          seed: as in `evaluate`.

        Yields:
          Each cell with its records, as soon as it is done.

        Raises:
          KvjaxError: after all other cells, where a method fails on a cell; a cell's worker dies again and again; or
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
        if sources != self._sources:
            self.stop()  # a name is registered once in a process
            self._sources = sources
        setup = self._ray.put(RunSetup(tuple(travels), dict(hashes), sources, question_aware, seed))
        failures: list[str] = []
        for is_speed in (False, True):
            wanted = [cell for cell in cells if cell.is_speed == is_speed]
            if wanted:
                self._start(one_per_node=is_speed)
                yield from self._run_cells(wanted, setup, failures)
        if failures:
            more = f"; {display.count(len(failures) - 1, 'other')} failed, too" if len(failures) > 1 else ""
            raise KvjaxError(f"{failures[0]}{more}")

    def _run_cells(
        self, cells: Sequence[Cell], setup: Any, failures: list[str]
    ) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
        left = {cell.index: cell for cell in cells}
        for _ in range(ROUNDS):
            pool = self._ray.util.ActorPool(self._actors)
            for cell in left.values():
                pool.submit(lambda actor, cell: actor.run.remote(setup, cell), cell)
            while pool.has_next():
                try:
                    index, records, errors = pool.get_next_unordered()
                except self._ray.exceptions.RayTaskError as e:
                    raise _name_cause(e) from e
                except self._ray.exceptions.RayError:
                    continue  # the worker is gone, and its cell stays in `left`
                for error in errors:
                    self._say(error)
                failures += errors
                yield left.pop(index), records
            if not left:
                return
            self._leave_out_lost()
        cell = next(iter(left.values()))
        what = f"{display.count(len(cell.batch.cases), 'case')} of {cell.task}, {', '.join(cell.methods)}"
        raise KvjaxError(
            f"cell {cell.index} ({what}) ended its worker {ROUNDS * (RETRIES + 1)} times; what was done before is "
            "kept. A smaller --batch with another --out takes less memory"
        )

    def _leave_out_lost(self) -> None:
        """Leaves out the workers that Ray could not start again; raises KvjaxError if none is left."""
        alive = []
        for actor in self._actors:
            try:
                self._ray.get(actor.process_id.remote(), timeout=PLACE_SECONDS)
                alive.append(actor)
            except self._ray.exceptions.RayError:
                self._ray.kill(actor, no_restart=True)
        num_lost, self._actors = len(self._actors) - len(alive), alive
        if not alive:
            raise KvjaxError("no worker is left in the cluster; what was done before is kept")
        if num_lost:
            lost, rest = display.count(num_lost, "worker"), display.count(len(alive), "worker")
            self._say(f"{lost} lost; the run goes on with {rest}")

    def stop(self) -> None:
        """Ends all workers."""
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        self._actors = []

    def _alive_nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _count_devices(self, node: Mapping[str, Any]) -> int:
        return int(node["Resources"].get(self.kind.upper(), 0))

    def _start(self, one_per_node: bool) -> None:
        """Starts the workers, unless they run already, and waits until they have loaded the model.

        Raises:
          KvjaxError: a worker finds no place, cannot load the model, or differs from the others.
        """
        if self._actors and self._is_one_per_node == one_per_node:
            return
        self.stop()
        self._is_one_per_node = one_per_node
        places = self._choose_nodes(one_per_node)
        if not places:
            raise KvjaxError("no node with a device is left in the cluster; what was done before is kept")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        needs = {
            "cpu": {"num_cpus": 1},
            "gpu": {"num_cpus": 0, "num_gpus": 1},
            "tpu": {"num_cpus": 0, "resources": {"TPU": 1}},
        }[self.kind]
        for node in places:
            # Calls wait while Ray starts an actor again, which an actor without retries of calls would refuse.
            actor_class = self._ray.remote(Worker).options(
                max_restarts=-1,
                max_task_retries=RETRIES,
                scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node, soft=False),
                **needs,
            )
            # On an accelerator the processor's cores have little to do.
            sharers = places.count(node) if self.kind == "cpu" else 1
            self._actors.append(actor_class.remote(self.kind, sharers, os.getcwd(), self._model))
        errors = self._ray.exceptions
        try:
            self._ray.get([actor.process_id.remote() for actor in self._actors], timeout=PLACE_SECONDS)
            found = self._ray.get([actor.load.remote() for actor in self._actors])
        except errors.GetTimeoutError as e:
            raise KvjaxError(
                f"Ray has not started all {len(places)} workers within {PLACE_SECONDS:.0f} s: devices are in use "
                "(`ray status` says by what); free them, or give a smaller --workers"
            ) from e
        except errors.RayTaskError as e:
            raise _name_cause(e) from e
        except errors.RayError as e:
            remedy = "its node may lack memory for as many workers: give a smaller --workers"
            if getattr(e, "actor_init_failed", False):
                remedy = "install the same version of kvjax on every node"
            raise KvjaxError(f"a worker cannot start: {_last_line(e)}; {remedy}") from e
        self._machine = self._machine or found[0]["machine"]
        for worker in found:
            for name, value in worker["equal"].items():
                if self._equal.setdefault(name, value) != value:
                    raise KvjaxError(
                        f"a worker has {name} {value}, and the others have {self._equal[name]}, under which records "
                        "differ; run on nodes with devices of one kind and with the same versions"
                    )

    def _choose_nodes(self, one_per_node: bool) -> list[str]:
        """Chooses the node of each worker, node by node in turn."""
        capacities = {}
        for node in sorted(self._alive_nodes(), key=lambda node: node["NodeID"]):
            capacity = self._count_devices(node)
            if self.kind == "cpu" and self._num_workers is None:
                # A node whose memory holds one model gets one worker, whatever its cores.
                most = node["Resources"].get("memory", math.inf) // (2 * self._model_bytes + BYTES_PER_WORKER)
                capacity = int(min(capacity, max(most, 1)))
            # Speed that is measured beside another worker is that of half a machine.
            capacities[node["NodeID"]] = min(capacity, 1) if one_per_node else capacity
        turns = ((node, i) for i in range(max(capacities.values(), default=0)) for node in capacities)
        return [node for node, i in turns if i < capacities[node]][: self._num_workers]


def _name_cause(error: Any) -> KvjaxError:
    """The error that a worker raised, in place of Ray's, whose text is a traceback."""
    cause = error.cause
    return KvjaxError(str(cause) if isinstance(cause, KvjaxError) else f"a worker failed: {_last_line(error)}")


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:300]
