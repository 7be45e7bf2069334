"""Workers on Ray: what they write is what one process writes, whoever dies. One cluster of two workers serves all."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import pytest

import kvjax
from kvjax import cli
from kvjax.errors import KvjaxError
from kvjax.eval.run import eval_command, ray_workers, store
from kvjax.eval.run.ray_workers import ModelSetup, RayWorkers, RunSetup, Worker, connect_ray
from kvjax.models import checkpoint
from kvjax.registry.method_hash import method_hash
from kvjax.registry.sources import pack_sources
from kvjax.testbed import vocab
from kvjax.testing import toy_model
from tests.eval.run.light_worker import LightWorker
from tests.eval.run.test_eval_command import install_stubs, model, toy, write_summary  # noqa: F401

ROOT = Path(__file__).parents[3]
OWN_METHOD = """
import dataclasses
import jax.numpy as jnp
from helper_of_mine import SIGN
from kvjax import method_api as kv

@dataclasses.dataclass(frozen=True)
class ValueNorm(kv.Scorer):
    longest: int
    def scores(self, block, observation, spec):
        if block.v.shape[2] > self.longest:
            raise ValueError("too long for me")
        return kv.token_scores(SIGN * jnp.linalg.norm(block.v.astype(jnp.float32), axis=-1), block)

@kv.register_method
def my_norm(budget: kv.TokenBudget = 8, longest: int = 64):
    return kv.Method(select=kv.make_selection(ValueNorm(longest), budget))
"""


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of two CPUs on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # of the workers, who import this folder's modules
        patch.setenv("KVJAX_CACHE", str(jax.config.jax_compilation_cache_dir))
        with connect_ray("local", 2) as workers:
            yield workers._ray


@contextlib.contextmanager
def light_workers(cluster, folder, devices=("cpu", "cpu"), num_workers=2, announce=None):
    """Workers that are not started yet and load no model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_workers, "Worker", LightWorker)
        workers = RayWorkers(cluster, num_workers, announce)
        workers._model, workers._model_bytes = {"started": str(folder / "started"), "devices": devices}, 1
        try:
            yield workers
        finally:
            workers.stop()


def make_cell(folder, index, method):
    batch, tries = types.SimpleNamespace(cases=["a case"]), str(folder / f"tries-{index}")
    work = {"tries": tries, "gate": str(folder / "gate")}
    return types.SimpleNamespace(index=index, methods=(method,), task="niah", batch=batch, **work)


def run_cells(workers, folder, *methods):
    """Runs a cell for each method, and returns the records by cell and the failures."""
    failures = []
    done = workers._run_cells([make_cell(folder, i, method) for i, method in enumerate(methods)], None, failures)
    return {cell.index: records for cell, records in done}, failures


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
    # This comes before the cluster of the other tests, to which `auto` would connect.
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert cli.main(["eval", "--model", "no-such-model", "--out", str(tmp_path), *args]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_two_workers_of_which_one_is_killed_write_what_one_process_writes(
    cluster,
    toy,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
    clean_registry,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper_of_mine.py").write_text("SIGN = -1\n")
    (tmp_path / "my_norm_file.py").write_text(OWN_METHOD)
    monkeypatch.setattr(eval_command, "summarize", write_summary)
    args = [*toy[:3], "--load", "my_norm_file.py", "--tasks", "asking,text", "--lengths", "40,44", "--batch", "2"]
    args += ["--contexts", "4", "--no-speed", "--methods", "full; snapkv:budget=16,window=4; my_norm:budget=16"]
    workers, append, victims = RayWorkers(cluster, 2, None), store.Store.append, []
    monkeypatch.setattr(eval_command, "connect_if_asked", lambda *_: contextlib.nullcontext(workers))

    def stop_after(self, records):
        append(self, records)
        raise KeyboardInterrupt

    def kill_after(self, records):
        append(self, records)
        if not victims:
            victims.append(pids[0])
            os.kill(pids[0], signal.SIGKILL)

    with contextlib.closing(types.SimpleNamespace(close=workers.stop)):
        monkeypatch.setattr(store.Store, "append", stop_after)
        assert cli.main([*args, "--out", "ray", "--ray", "auto"]) == 2
        kept = len(store.read(Path("ray")))
        assert f"stopped; ray keeps {kept} records, and the same command goes on from there" in capsys.readouterr().err
        pids = cluster.get([actor.process_id.remote() for actor in workers._actors])
        monkeypatch.setattr(store.Store, "append", kill_after)
        assert cli.main([*args, "--out", "ray", "--ray", "auto"]) == 0
        assert kept < 3 * 2 * 8 == len(store.read(Path("ray"))) and len(victims) == 1
        again = cluster.get([actor.process_id.remote() for actor in workers._actors])
        assert again[0] != pids[0] and again[1] == pids[1]  # Ray started it again

        # A method that fails on some cells leaves records of all others.
        monkeypatch.setattr(store.Store, "append", append)
        args[-1] = "full; my_norm:budget=16,longest=63"
        capsys.readouterr()
        assert cli.main([*args, "--out", "fails", "--ray", "auto"]) == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("kvjax: my_norm:budget=16,longest=63 on ") and "ValueError: too long for me" in last
        assert "7 others failed, too" in last and len(store.read(Path("fails"))) == 2 * 8
        args[-1] = "full; snapkv:budget=16,window=4; my_norm:budget=16"
    assert cli.main([*args, "--out", "alone"]) == 0
    assert store.read(Path("ray")) == store.read(Path("alone"))
    assert Path("ray/summary.csv").read_bytes() == Path("alone/summary.csv").read_bytes()


def test_a_cell_that_ends_its_workers_is_tried_three_times_more_and_then_named(cluster, tmp_path):
    with light_workers(cluster, tmp_path) as workers:
        workers._start(one_per_node=False)
        records, failures = run_cells(workers, tmp_path, "full", "dies once", "fails", "full")
        assert records == {0: ["full"], 1: ["dies once"], 2: [], 3: ["full"]} and failures == ["a method fails"]
        (tmp_path / "bad").mkdir()
        with pytest.raises(KvjaxError, match=r"cell 1 \(1 case of niah, dies\) ended its worker 4 times"):
            run_cells(workers, tmp_path / "bad", "full", "dies", "full")
        tries = [(tmp_path / "bad" / f"tries-{i}").stat().st_size for i in range(3)]
        assert tries == [1, 4, 1]


def test_a_node_that_is_lost_leaves_its_cells_to_the_others(cluster, tmp_path):
    address, said = cluster.get_runtime_context().gcs_address, []
    command = [str(Path(sys.executable).with_name("ray")), "start", "--address", address, "--num-cpus", "1", "--block"]
    node = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while sum(each["Alive"] for each in cluster.nodes()) < 2:
            assert node.poll() is None
            time.sleep(0.1)
        with light_workers(cluster, tmp_path, num_workers=3, announce=said.append) as workers:
            workers._start(one_per_node=True)
            assert len(workers._actors) == 2
            workers._start(one_per_node=False)
            assert len(workers._actors) == 3
            failures = []
            cells = [make_cell(tmp_path, i, "waits" if i else "full") for i in range(6)]
            running = workers._run_cells(cells, None, failures)
            done = [next(running)]
            node.terminate()
            node.wait()
            (tmp_path / "gate").touch()
            done += running
            assert sorted(cell.index for cell, _ in done) == list(range(6)) and not failures
            assert said == ["1 worker lost; the run goes on with 2 workers"] and len(workers._actors) == 2
    finally:
        node.kill()
        node.wait()


def test_a_worker_with_another_device_is_refused(cluster, tmp_path):
    says = "a worker has device [AH]100, and the others have [AH]100, under which records differ"
    with (
        light_workers(cluster, tmp_path, devices=("H100", "A100")) as workers,
        pytest.raises(KvjaxError, match=says),
    ):
        workers._start(one_per_node=False)


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
        RayWorkers(describe_cluster(nodes), num_workers, None)


def describe_cluster(nodes):
    """Stands in for Ray's module, connected to nodes with these resources."""
    alive = [{"NodeID": name, "Alive": True, "Resources": resources} for name, resources in nodes.items()]
    return types.SimpleNamespace(nodes=lambda: alive)


def test_each_device_has_a_worker_and_speed_a_node_of_its_own():
    nodes = {"a": {"CPU": 3.0, "memory": 2.5 * 2**30}, "b": {"CPU": 2.0, "memory": 9e9}}
    workers = RayWorkers(describe_cluster(nodes), None, None)
    workers._model_bytes = 2**20
    assert workers._choose_nodes(one_per_node=False) == ["a", "b", "a", "b"]  # memory for two models on a
    assert workers._choose_nodes(one_per_node=True) == ["a", "b"]
    workers = RayWorkers(describe_cluster(nodes), 3, None)
    assert workers._choose_nodes(one_per_node=False) == ["a", "b", "a"]


def test_a_worker_names_what_is_wrong_on_its_node(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "chdir", lambda _: None)
    with pytest.raises(KvjaxError, match=r"there is no checkpoint /no/such/folder on \S+; copy it"):
        Worker("cpu", 1, ".", ModelSetup("/no/such/folder", "float32", None, "")).load()
    with pytest.raises(KvjaxError, match=r"Ray gives a worker on \S+ a gpu, and JAX finds only a cpu"):
        Worker("gpu", 1, ".", ModelSetup("testbed", "float32", None, "")).load()
    small = toy_model(layers=1, vocab_size=vocab.SIZE)
    checkpoint.save(tmp_path / "m", small.config, small.params, extra_files=vocab.tokenizer_files())
    with pytest.raises(KvjaxError, match=r"m has other weights on \S+ than where the command runs"):
        Worker("cpu", 1, ".", ModelSetup(str(tmp_path / "m"), "float32", None, "all:0")).load()
    worker = Worker("cpu", 1, ".", ModelSetup(str(tmp_path / "m"), "float32", None, small.fingerprint))
    worker.load()
    worker.prepare(RunSetup(("int8",), {"int8": method_hash(kvjax.parse("int8"))}, (), False, 0))
    with pytest.raises(KvjaxError, match=r"'int8' is another method on \S+ than"):
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


def test_a_missing_ray_is_named_with_its_remedy(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["eval", "--ray", "local"]) == 2
    assert 'kvjax: --ray needs ray: pip install "kvjax[ray]"' in capsys.readouterr().err
