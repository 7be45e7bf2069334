"""Workers on Ray: what they write is what one process writes, whoever dies; a real cluster, and one that is acted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax import cli
from kvjax.errors import KvjaxError
from kvjax.eval.run import eval_command, ray_workers, store
from kvjax.eval.run.cell_queue import CellQueue
from kvjax.eval.run.cells import make_cells
from kvjax.eval.run.evaluate import missing_cells
from kvjax.eval.run.machine import version
from kvjax.eval.run.ray_workers import ModelSetup, RayWorkers, RunSetup, Worker
from kvjax.eval.run.workers_run import run_on_workers
from kvjax.eval.tasks.case import Ask, Case
from kvjax.models import checkpoint
from kvjax.registry.method_hash import method_hash
from kvjax.registry.sources import pack_sources
from kvjax.testbed import vocab
from kvjax.testing import toy_model
from tests.eval.run import test_eval_command
from tests.eval.run.fake_ray import FakeRay

ROOT = Path(__file__).parents[3]
METHODS = ("full", "int8", "int4")
HASHES = {name: f"hash of {name}" for name in METHODS}
OWN_METHOD = """
import dataclasses
import jax.numpy as jnp
from helper_of_mine import SIGN
from kvjax import method_api as kv

@dataclasses.dataclass(frozen=True)
class ValueNorm(kv.Scorer):
    def scores(self, block, observation, spec):
        return kv.token_scores(SIGN * jnp.linalg.norm(block.v.astype(jnp.float32), axis=-1), block)

@kv.register_method
def my_norm(budget: kv.TokenBudget = 8):
    return kv.Method(select=kv.make_selection(ValueNorm(), budget))
"""


def make_cases(num_cases=5, lengths=(16, 24), tasks=("a", "b")):
    ask = Ask(np.zeros(3, np.int32), "contains_any", ("a",), 4)
    return [
        Case(task, f"{task}/{n}/{i}", np.zeros(n, np.int32), (ask,), about={"length": n})
        for task in tasks
        for n in lengths
        for i in range(num_cases)
    ]


def make_records(cell, name):
    score = {"scores": [len(name) / 8], "bytes": {"device": cell.index}}
    return [{"method": name, "task": c.task, "key": c.key, **score} for c in cell.batch.cases]


class ActedWorker(Worker):
    """A worker without a model: its records tell the cell and the method, and nothing of the worker."""

    def start(self, setup):
        versions = {name: version(name) for name in ("kvjax", "jax", "jaxlib")}
        return {"equal": {"device": "cpu", **versions}, "machine": {}}

    def prepare(self, run):
        assert run.hashes == HASHES

    def run(self, cell, name):
        if name == "int4" and any(c.key == "fails" for c in cell.batch.cases):
            raise KvjaxError("int4 on b: there are too few tokens")
        return make_records(cell, name)


def run_child(ray, alone, num_records):
    """Runs the command on two workers, interrupts it and starts it again, kills one half-way; then runs it alone."""
    # A shell that runs the tests in the background has them ignore interrupts, and this process would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    jax.config.update("jax_compilation_cache_dir", os.environ["KVJAX_CACHE"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    cli.use_compilation_cache = lambda: None
    eval_command.summarize = test_eval_command.write_summary
    test_eval_command.install_stubs()
    clusters, pids, init = [], [], RayWorkers.__init__
    originals = {name: getattr(store.Store, name) for name in ("append", "append_early")}

    def note_cluster(self, *args):
        init(self, *args)
        clusters.append(self)

    def kill_after(self, name, records):
        originals[name](self, records)
        num_kept, slots = len(self.records) + len(self.early_records), clusters[-1]._slots
        running = [int(slot.place.split()[1]) for slot in slots if slot.stage == "run"]
        if len(clusters) == 1 and num_kept >= num_records // 4:
            pids.extend(int(slot.place.split()[1]) for slot in slots)
            os.kill(os.getpid(), signal.SIGINT)
        elif len(clusters) == 2 and num_kept >= num_records // 2 and len(pids) == 2 and running:
            pids.append(running[0])
            os.kill(running[0], signal.SIGKILL)

    RayWorkers.__init__ = note_cluster
    for name in originals:
        setattr(store.Store, name, lambda self, records, name=name: kill_after(self, name, records))
    assert cli.main(ray) == 2
    assert cli.main(ray) == 0
    for name, original in originals.items():
        setattr(store.Store, name, original)
    assert cli.main(alone) == 0
    print(json.dumps(pids))


def test_two_workers_of_which_one_is_killed_write_what_one_process_writes(tmp_path):
    toy = toy_model(layers=1, vocab_size=vocab.SIZE)
    checkpoint.save(tmp_path / "m", toy.config, toy.params, extra_files=vocab.tokenizer_files())
    (tmp_path / "helper_of_mine.py").write_text("SIGN = -1\n")
    (tmp_path / "my_norm_file.py").write_text(OWN_METHOD)
    argv = ["eval", "--model", "m", "--load", "my_norm_file.py", "--tasks", "asking,text", "--lengths", "40,44"]
    argv += ["--methods", "full; snapkv:budget=16,window=4; my_norm:budget=16", "--contexts", "6", "--batch", "2"]
    argv += ["--no-speed", "--out"]
    runs = [*argv, "ray", "--ray", "local", "--workers", "2"], [*argv, "alone"], 72
    code = f"from tests.eval.run.test_ray_workers import run_child; run_child(*{runs!r})"
    env = os.environ | {"KVJAX_CACHE": jax.config.jax_compilation_cache_dir, "PYTHONPATH": str(ROOT)}
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    ray, alone = tmp_path / "ray", tmp_path / "alone"
    assert (ray / store.RECORDS).read_bytes() == (alone / store.RECORDS).read_bytes()
    assert (ray / store.RECORDS).read_bytes().count(b"\n") == 72 and not (ray / store.EARLY).exists()
    assert (ray / "summary.csv").read_bytes() == (alone / "summary.csv").read_bytes()
    pids = json.loads(child.stdout.splitlines()[-1])
    assert len(pids) == 3 and not any(Path(f"/proc/{pid}").exists() for pid in pids)  # and the others ended, too
    assert child.stderr.count("is tried again, time 1 of 3") == 1
    kept = re.search(
        r"^kvjax: stopped; ray keeps (\d+) records, and the same command goes on from there$", child.stderr, re.M
    )
    assert kept is not None and 18 <= int(kept[1]) < 72
    assert not any(word in child.stderr for word in ("raylet", "Warning", "Traceback")), child.stderr


@pytest.fixture
def acted(monkeypatch):
    monkeypatch.setattr(ray_workers, "Worker", ActedWorker)


def run_acted(cluster, out, cases, num_workers=None, announce=None, speed=()):
    """Runs cases on an acted cluster into a folder; returns the text of its records."""
    workers = RayWorkers(cluster, num_workers, announce)
    workers._model, workers._model_bytes = ModelSetup("", "", ""), 1
    methods = {name: kvjax.parse(name) for name in METHODS}
    cells = make_cells(cases, METHODS, 2, speed)
    about = {"model": "toy", "methods": [], "tasks": [], "lengths": [], "machine": {}, "kvjax": "", "started": ""}
    try:
        with store.open_store(out, about | dict.fromkeys(store.CONDITIONS)) as records:
            missing = missing_cells(cells, records)
            run_on_workers(
                workers,
                methods,
                HASHES,
                missing,
                records,
                lambda cell: (cell.task, cell.batch.cases[0].about["length"]),
                question_aware=False,
                seed=0,
                progress=None,
                announce=announce,
                other_seconds=0.0,
            )
    finally:
        workers.stop()
    return (out / store.RECORDS).read_text()


def in_order(cases, speed=()):
    """The methods and keys of records in the order of one process."""
    cells = make_cells(cases, METHODS, 2, speed)
    return [(name, c.key) for cell in cells for name in cell.methods for c in cell.batch.cases]


def keys(text):
    return [(r["method"], r["key"]) for r in map(json.loads, text.splitlines())]


def test_records_are_the_same_whatever_the_number_of_workers_and_whoever_dies(acted, tmp_path):
    cases = make_cases()
    alone = run_acted(FakeRay({"n": {"CPU": 1.0}}), tmp_path / "alone", cases)
    assert keys(alone) == in_order(cases)
    for seed in range(12):
        rng, deaths = np.random.default_rng(seed), []

        def dies(actor, call, args, rng=rng, deaths=deaths):
            # Two of the four workers, at any call: as they start, get ready or run.
            if len(deaths) < 2 and rng.random() < 0.2:
                deaths.append(call)
                return True
            return False

        cluster = FakeRay({"n1": {"CPU": 2.0}, "n2": {"CPU": 2.0}}, dies, lambda n, rng=rng: int(rng.integers(n)))
        assert run_acted(cluster, tmp_path / str(seed), cases) == alone
        assert len(deaths) == 2 and max(cluster.most_alive.values()) == 2
        assert not (tmp_path / str(seed) / store.EARLY).exists()


def test_a_node_that_is_lost_leaves_its_cells_to_the_others(acted, tmp_path):
    cases, calls = make_cases(), []

    def dies(actor, call, args):
        calls.append(call)
        if calls.count("run") == 5:
            cluster.resources.pop("n1", None)
        return False

    cluster = FakeRay({"n1": {"GPU": 2.0}, "n2": {"GPU": 1.0}}, dies, lambda n: n - 1)
    assert keys(run_acted(cluster, tmp_path, cases)) == in_order(cases)
    assert all(actor.needs == {"num_cpus": 0, "num_gpus": 1} for actor in cluster.actors)

    # A node on which nothing starts, as one that has died and that Ray still takes for alive.
    said = []
    cluster = FakeRay({"n1": {"CPU": 1.0}, "n2": {"CPU": 1.0}}, lambda a, call, _: call == "start" and a.node == "n1")
    assert keys(run_acted(cluster, tmp_path / "one", cases, announce=said.append)) == in_order(cases)
    assert len(said) == 4 and said[-1].endswith("died 4 times as it started; the run goes on with 1 worker")

    cluster = FakeRay({"n1": {"CPU": 1.0}}, lambda *_: cluster.resources.pop("n1", None) is None)
    with pytest.raises(KvjaxError, match="no node with a device is left"):
        run_acted(cluster, tmp_path / "none", cases)


def test_a_cell_that_ends_its_workers_is_tried_three_times_more_and_then_named(acted, tmp_path):
    cases, said = make_cases(), []
    bad = make_cells(cases, METHODS, 2)[3].batch.cases[0].key
    tries = []

    def dies(actor, call, args):
        is_bad = call == "run" and args[1] == "int8" and args[0].batch.cases[0].key == bad
        tries.extend([actor] * is_bad)
        return is_bad

    with pytest.raises(KvjaxError, match=r"cell 3 \(2 cases of a, int8\) ended 4 workers, the last of them worker"):
        run_acted(FakeRay({"n": {"CPU": 2.0}}, dies), tmp_path, cases, announce=said.append)
    assert len(tries) == len(set(map(id, tries))) == 4
    assert [line.partition(" is ")[2] for line in said] == [f"tried again, time {i} of 3" for i in (1, 2, 3)]
    kept = keys((tmp_path / store.RECORDS).read_text())
    assert kept == in_order(cases)[: len(kept)] and len(kept) == 3 * 5 + 2

    said.clear()
    with pytest.raises(KvjaxError, match="died 4 times as it started; .* smaller --workers"):
        run_acted(FakeRay({"n": {"CPU": 1.0}}, lambda a, call, _: call == "start"), tmp_path, cases, None, said.append)
    assert len(said) == 3


def test_a_worker_that_hangs_is_replaced(acted, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_workers, "HANG_SECONDS", 0.05)
    monkeypatch.setattr(ray_workers, "HANG_FACTOR", 0.0)
    cases, said, hangs = make_cases(), [], []

    def hang(actor, call):
        if call == "run" and not hangs:
            hangs.append(actor)
        return actor in hangs

    cluster = FakeRay({"n": {"CPU": 2.0}}, hangs=hang)
    assert keys(run_acted(cluster, tmp_path, cases, announce=said.append)) == in_order(cases)
    assert hangs[0].is_dead and sum("did not answer for 0 s; cell " in line for line in said) == 1


def test_a_cell_that_fails_ends_the_run_at_once_and_keeps_what_was_done(acted, tmp_path, monkeypatch):
    cases, calls = make_cases(), []
    fails = [dataclasses.replace(c, key="fails") if c.key == "b/16/0" else c for c in cases]

    def count(actor, call, args):
        if call == "run" and any(c.key == "fails" for c in args[0].batch.cases):
            calls.append(args[1])
        return False

    choose = np.random.default_rng(0).integers
    with pytest.raises(KvjaxError, match="^int4 on b: there are too few tokens$"):
        run_acted(FakeRay({"n": {"CPU": 3.0}}, count, lambda n: int(choose(n))), tmp_path, fails)
    assert calls.count("int4") == 1
    in_turn = keys((tmp_path / store.RECORDS).read_text())
    early = keys((tmp_path / store.EARLY).read_text())
    assert in_turn == in_order(fails)[: len(in_turn)]
    assert early and not set(early) & set(in_turn) and ("int4", "fails") not in [*early, *in_turn]

    # The cell is mended, and nothing that was done is done again.
    calls.clear()
    mended = FakeRay({"n": {"CPU": 1.0}}, lambda a, call, args: calls.append((call, args)) or False)
    monkeypatch.setattr(ActedWorker, "run", lambda self, cell, name: make_records(cell, name))
    assert keys(run_acted(mended, tmp_path, fails)) == in_order(fails)
    again = [(args[1], c.key) for call, args in calls if call == "run" for c in args[0].batch.cases]
    assert sorted(again) == sorted(set(in_order(fails)) - set(in_turn) - set(early))
    assert not (tmp_path / store.EARLY).exists()


def test_speed_is_measured_last_by_one_worker_on_each_node(acted, tmp_path):
    order = []

    def note(actor, call, args):
        if call == "run":
            order.append((args[0].is_speed, actor.node, sum(not a.is_dead for a in cluster.actors)))
        return False

    turns = itertools.cycle(range(4))
    cluster = FakeRay({"n1": {"CPU": 2.0}, "n2": {"CPU": 2.0}}, note, lambda n: next(turns) % n)
    cases = make_cases(2)
    assert keys(run_acted(cluster, tmp_path, cases, speed=(16, 24))) == in_order(cases, (16, 24))
    quality, speed = order[: order.index(next(x for x in order if x[0]))], [x for x in order if x[0]]
    assert order == [*quality, *speed] and {alive for _, _, alive in quality} == {4}
    assert {alive for _, _, alive in speed} == {2} and {node for _, node, _ in speed} == {"n1", "n2"}


@pytest.mark.parametrize(
    ("nodes", "num_workers", "says"),
    [
        ({"a": {"GPU": 1.0}, "b": {"TPU": 4.0}}, None, r"several kinds \(gpu, tpu\)"),
        (
            {"a": {"GPU": 1.0, "accelerator_type:H100": 1.0}, "b": {"GPU": 1.0, "accelerator_type:A100": 1.0}},
            None,
            r"several kinds \(accelerator_type:A100, accelerator_type:H100\)",
        ),
        ({"a": {"GPU": 2.0}, "b": {"CPU": 8.0}}, 3, "--workers asks for 3, and the cluster has 2 GPUs"),
        ({"a": {}}, None, "asks for 1, and the cluster has 0 CPUs"),
    ],
)
def test_a_cluster_of_several_kinds_or_too_few_devices_is_refused(nodes, num_workers, says):
    with pytest.raises(KvjaxError, match=says):
        RayWorkers(FakeRay(nodes), num_workers, None)


def test_a_worker_with_another_device_or_version_is_refused(acted, tmp_path, monkeypatch):
    devices = iter(("H100", "A100"))
    found = {name: version(name) for name in ("kvjax", "jax", "jaxlib")}

    def start(self, setup):
        return {"equal": {"device": next(devices), **found}, "machine": {}}

    monkeypatch.setattr(ActedWorker, "start", start)
    with pytest.raises(KvjaxError, match="worker 2 .* has device A100, and the others have H100, under which records"):
        run_acted(FakeRay({"n": {"CPU": 2.0}}), tmp_path, make_cases())
    devices, found["jax"] = iter(("H100", "H100")), "0.0.1"
    with pytest.raises(KvjaxError, match="worker 1 .* has jax 0.0.1, and the others have "):
        run_acted(FakeRay({"n": {"CPU": 2.0}}), tmp_path, make_cases())


def test_workers_keep_to_the_shapes_that_they_have_compiled_and_steal_at_the_end():
    cells = make_cells(make_cases(8, lengths=(16, 24), tasks=("a",)), METHODS, 2)  # four cells of each length

    def length(cell):
        return cell.batch.cases[0].about["length"]

    queue = CellQueue(cells, length)
    taken = [(worker, length(queue.take(worker))) for worker in (0, 1, 1, 1, 1)]
    assert taken == [(0, 16), (1, 24), (1, 24), (1, 24), (1, 24)]
    stolen = queue.take(1)
    assert length(stolen) == 16 and stolen.index == 1
    queue.put_back(stolen)
    assert [queue.take(0).index for _ in range(3)] == [1, 2, 3] and queue.take(0) is None and len(queue) == 0


def test_a_worker_names_what_is_wrong_on_its_node(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "chdir", lambda _: None)
    with pytest.raises(KvjaxError, match=r"there is no checkpoint /no/such/folder on this node; copy it"):
        Worker("cpu", 1, ".").start(ModelSetup("/no/such/folder", "float32", ""))
    with pytest.raises(KvjaxError, match="Ray gives this worker a gpu, and JAX finds only a cpu"):
        Worker("gpu", 1, ".").start(ModelSetup("testbed", "float32", ""))
    toy = toy_model(layers=1, vocab_size=vocab.SIZE)
    checkpoint.save(tmp_path / "m", toy.config, toy.params, extra_files=vocab.tokenizer_files())
    with pytest.raises(KvjaxError, match="m has other weights on this node"):
        Worker("cpu", 1, ".").start(ModelSetup(str(tmp_path / "m"), "float32", "all:0"))
    worker = Worker("cpu", 1, ".")
    worker.start(ModelSetup(str(tmp_path / "m"), "float32", toy.fingerprint))
    worker.prepare(RunSetup(("int8",), {"int8": method_hash(kvjax.parse("int8"))}, (), False, 0))
    with pytest.raises(KvjaxError, match="'int8' is another method here"):
        worker.prepare(RunSetup(("int8",), {"int8": "0" * 16}, (), False, 0))


def test_a_users_method_travels_with_the_modules_beside_it(tmp_path, clean_registry):
    (tmp_path / "helper_of_mine.py").write_text("SIGN = -1\n")
    (tmp_path / "my_norm_file.py").write_text(OWN_METHOD)
    kvjax.method_api.load_methods(tmp_path / "my_norm_file.py")
    (packed,) = pack_sources(["full", "my_norm:budget=4 + int8"])
    assert set(packed.files) == {"my_norm_file.py", "helper_of_mine.py"} and packed.load == ("my_norm_file.py",)
    assert pack_sources(["full", "snapkv:budget=8 + int8"]) == []
    code = (
        "import pickle, sys, kvjax; from kvjax.registry.method_hash import method_hash; "
        "from kvjax.registry.sources import load_sources; load_sources(pickle.load(sys.stdin.buffer)); "
        "print(method_hash(kvjax.parse('my_norm:budget=4')))"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.run([sys.executable, "-c", code], input=pickle.dumps([packed]), capture_output=True, env=env)
    assert child.stdout.decode().strip() == method_hash(kvjax.parse("my_norm:budget=4")), child.stderr.decode()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--workers", "2"], "--workers is how many workers --ray has"),
        (["--ray", "somewhere"], "'local', 'auto' or HOST:PORT"),
        (["--ray", "local", "--workers", "0"], "workers must be an integer from 1"),
        (["--ray", "127.0.0.1:9"], "no Ray cluster answers at 127.0.0.1:9"),
        (["--ray", "auto"], "no Ray cluster answers at "),  # that of RAY_ADDRESS
    ],
)
def test_wrong_options_end_with_one_line_before_a_model_is_loaded(args, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert cli.main(["eval", "--model", "no-such-model", "--out", str(tmp_path), *args]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_missing_ray_is_named_with_its_remedy(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["eval", "--ray", "local"]) == 2
    assert 'kvjax: --ray needs ray: pip install "kvjax[ray]"' in capsys.readouterr().err
