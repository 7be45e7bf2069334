"""Programs for accelerators that this machine lacks: three methods for a TPU, and a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bench import aot
from experiments.bench.cross_compile import LIBTPU, open_topology
from kvjax import KvjaxError

METHODS = "full", "kcache:n=8,device_layers=1", "kivi:bits=2,group=48"


@pytest.mark.skipif(not LIBTPU.exists(), reason="no libtpu for this machine")
def test_methods_compile_for_a_tpu_and_what_stops_one_is_its_row(tmp_path):
    options = ["--topology", "v5e:2x2", "--model", "small", "--tokens", "256", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "experiments.bench.aot", *options, "--methods", ";".join(METHODS)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(aot.__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    full, kcache, kivi = json.loads(done.stdout.splitlines()[-1])["results"]
    assert "no multiple of group 48" in kivi["reasons"]["decode"] and "decode" not in kivi
    assert all("prefill" in x and "decode" in x and not x["reasons"] for x in (full, kcache))
    # Four devices have a head each: a quarter of the planned bytes, and the positions, which all of them hold.
    held = full["decode"]["device_bytes"] - full["decode"]["weight_bytes"]
    assert full["planned_bytes"]["device"] / 4 <= held < full["planned_bytes"]["device"] / 3
    assert full["decode"]["host_bytes"] == 0
    assert kcache["decode"]["fetches"] == 3  # in each of four layers but the first
    assert kcache["decode"]["host_bytes"] >= kcache["planned_bytes"]["pinned_host"] / 4 > 0
    page = (tmp_path / "bench.aot.md").read_text()
    assert "## v5e:2x2" in page and "| `kivi:bits=2,group=48` |" in page and "Of 3 rows, 2 have" in page


def test_a_topology_that_nothing_compiles_for_is_an_error():
    with pytest.raises(KvjaxError, match="cannot compile for 'v99:2x2'"):
        open_topology("v99:2x2")
