"""Programs for accelerators that this machine lacks: three methods for a TPU, a refusal, and the choice of layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from experiments.bench import aot
from experiments.bench.cross_compile import LIBTPU
from experiments.bench.process import Killed, iterate_in_process
from kvjax.engine.plan import bind
from kvjax.models import Config

CONFIG = Config.llama(vocab_size=64, width=64, layers=16, heads=4, kv_heads=4, head_dim=16, mlp_width=64)
METHODS = "full", "kcache:n=8,device_layers=1", "snapkv:budget=32,window=8", "kivi:bits=2,group=48"


@pytest.fixture(scope="module")
def shapes():
    """A small model on the mesh of four devices that nobody has."""
    mesh = jax.sharding.AbstractMesh((1, 4), aot.MESH)
    return aot.Shapes("v5e:2x2", CONFIG, 256, mesh)


@pytest.mark.parametrize(
    ("method", "base", "more"),
    [
        ("full", (8,), ((15, (7, 8)),)),
        # Two of them are rare, and in the program as often as in the model.
        ("quest:budget=64,page=16", (0, 1, 9), ((13, (0, 1, 8, 9)),)),
        # Half of the layers come in pairs, whose two kinds are one unit.
        ("minicache", (4, 12, 13), ((7, (3, 4, 12, 13)), (3, (4, 10, 11, 12, 13)))),
        # Each layer draws by a seed of its own: the middle ones stand for all.
        ("keyformer:budget=64,recent=16", (8,), ((15, (7, 8)),)),
    ],
)
def test_layers_of_each_kind_are_compiled_and_one_more_of_the_frequent_kinds(shapes, method, base, more):
    plan = bind(method, CONFIG)
    sample = aot.choose_layers(plan, [shapes.state(layer) for layer in plan])
    assert (sample.base, sample.more) == (base, more)
    # Every layer of the model is counted once.
    assert len(sample.base) + sum(n * (len(one) - len(sample.base)) for n, one in sample.more) == CONFIG.layers


def test_a_model_costs_its_base_and_the_missing_layers():
    base = {"launches": 10, "workspace_bytes": 5, "compile_seconds": 1.0}
    more = {"launches": 13, "workspace_bytes": 7, "compile_seconds": 2.0}
    assert aot.scale(base, [(30, more)]) == {"launches": 100, "workspace_bytes": 7, "compile_seconds": 3.0}


def _end_abruptly():
    yield 1
    print("F1126 08:00:00 file.cc:1] Check failed: rank == 2", file=sys.stderr, flush=True)
    print("    @ 0x1234 abort", file=sys.stderr, flush=True)
    os.abort()


def test_a_compilers_abort_is_an_error_with_its_first_line():
    items = iterate_in_process(_end_abruptly, seconds=60.0)
    assert next(items) == 1
    with pytest.raises(Killed, match="Check failed: rank == 2"):
        next(items)


@pytest.mark.skipif(not LIBTPU.exists(), reason="no libtpu for this machine")
def test_methods_compile_for_a_tpu_and_what_stops_one_is_its_row(tmp_path):
    options = ["--topology", "v5e:2x2", "--model", "small", "--tokens", "512", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "experiments.bench.aot", *options, "--methods", ";".join(METHODS)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(aot.__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    full, kcache, snapkv, kivi = json.loads(done.stdout.splitlines()[-1])["results"]
    assert "no multiple of group 48" in kivi["reasons"]["decode"] and "decode" not in kivi
    assert all("prefill" in x and "decode" in x and not x["reasons"] for x in (full, kcache, snapkv))
    # Four devices have a head each: a quarter of the planned bytes, and the positions, which all of them hold.
    held, less = (x["decode"]["device_bytes"] - x["decode"]["weight_bytes"] for x in (full, snapkv))
    assert full["planned_bytes"]["device"] / 4 <= held < full["planned_bytes"]["device"] / 3
    assert less < held / 3
    assert full["decode"]["host_bytes"] == snapkv["decode"]["host_bytes"] == 0
    assert kcache["decode"]["fetches"] == 3  # in each of four layers but the first
    assert kcache["decode"]["host_bytes"] >= kcache["planned_bytes"]["pinned_host"] / 4 > 0
    page = (tmp_path / "bench.aot.md").read_text()
    assert "## v5e:2x2" in page and "| `kivi:bits=2,group=48` |" in page and "Of 4 rows, 3 have" in page

    # What has a result is left alone; with --again, a program is compiled only if it has changed.
    command[-1] = f"{METHODS[0]};{METHODS[2]}"
    again = subprocess.run(
        [*command, "--again", "--programs", "decode"], env=environment, capture_output=True, text=True
    )
    results = json.loads(again.stdout.splitlines()[-1])["results"]
    assert [x["decode"] for x in results[:3]] == [x["decode"] for x in (full, kcache, snapkv)]  # the seconds, too
    assert results[1] == kcache and results[3] == kivi
    command[command.index("v5e:2x2")] = "v99:2x2"
    wrong = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert wrong.returncode and "cannot compile for 'v99:2x2'" in wrong.stderr
