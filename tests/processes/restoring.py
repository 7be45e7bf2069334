"""What one of two processes restores in `test_restore.py`.

python -m tests.processes.restoring HOST:PORT I/2 FOLDER, with checkpoints whole, other and damaged in FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import tensorstore  # noqa: F401  (so that the reading of the library does not count)

import kvjax
from kvjax import processes
from kvjax.core.mesh import make_mesh
from kvjax.eval import Spec

if __name__ == "__main__":
    coordinator, process, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    processes.initialize(coordinator, process)
    number, mesh = processes.process_index() + 1, make_mesh(1, 2)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    model = kvjax.load(folder / "whole", mesh=mesh)
    read = bytes_read() - before
    shards = {
        jax.tree_util.keystr(path): [[i.indices(n)[:2] for i, n in zip(s.index, x.shape, strict=True)], s.data.tolist()]
        for path, x in jax.tree_util.tree_leaves_with_path(model.params["layer_1"])
        for s in x.addressable_shards
    }
    found = {"read": read, "shards": shards, "weights": model.fingerprint}
    found["int8"] = kvjax.load(folder / "whole", mesh=mesh, weights="int8").fingerprint
    refused = {
        "checkpoint": lambda: kvjax.load(folder / ("whole", "other")[number - 1], mesh=mesh),
        "dtype": lambda: kvjax.load(folder / "whole", mesh=mesh, dtype=("float32", "bfloat16")[number - 1]),
        "kind of weights": lambda: kvjax.load(folder / "whole", mesh=mesh, weights=("int8", None)[number - 1]),
        "evaluation": lambda: kvjax.eval.compare(
            kvjax.load("testbed", mesh=mesh),
            ("full", "offload")[number - 1],
            "niah",
            Spec((64,), contexts=1, depths=1, seed=number),
        ),
    }
    for name, call in refused.items():
        try:
            call()
        except kvjax.KvjaxError as e:
            found[name] = str(e)
    (folder / f"{number}.json").write_text(json.dumps(found))
    kvjax.load(folder / "damaged", mesh=mesh)
    processes.gather("restored")  # process 2 never comes
