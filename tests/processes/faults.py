"""One of two processes in which something goes wrong, for `test_faults.py`.

python -m tests.processes.faults HOST:PORT I/2 WHAT
"""

from __future__ import annotations

import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kvjax import processes
from kvjax.core.mesh import make_mesh, put, to_numpy
from kvjax.errors import KvjaxError
from kvjax.generation.programs import Timer

if __name__ == "__main__":
    coordinator, process, what = sys.argv[1:]
    processes.initialize(coordinator, process, lost_after_seconds=8)
    x = put(np.arange(8), NamedSharding(make_mesh(2, 1), PartitionSpec("data")))
    to_numpy(x)
    print("ready", flush=True)
    if what == "error" and process == "2/2":
        raise KvjaxError("a file that only one process misses")
    while what == "idle":  # outside all computations, where nothing fails by itself
        time.sleep(0.1)
    while True:
        with Timer().timed():
            to_numpy(jax.numpy.square(x))
