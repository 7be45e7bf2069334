"""Bytes read, peak memory and seconds of restoring a checkpoint, in one process and in several that share its mesh.

python -m experiments.bench.restore [--gigabytes 2] [--directory DIR] [--layouts 1x1x1,1x1x4,2x1x4,2x2x2]

A layout is processes x sequences x heads; its processes share a CPU device for each place of the mesh. A checkpoint of
random weights in bfloat16 (8 key/value heads of 64, width 2048) is written first, or found in --directory, as that of
an older version. Bytes read are those of the process's system calls, whether the disk or the page cache gave them.
"Beyond" is the peak of a process minus its memory before and the shards that it holds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from experiments.bench import measuring
from experiments.bench.process import peak_bytes
from kvjax import processes
from kvjax.eval.run.machine import machine
from kvjax.eval.tasks.suite import split_words
from kvjax.models import checkpoint

COLUMNS = ("layout", "process", "held", "read", "read / held", "peak", "beyond", "seconds")


def write_random(directory: Path, gigabytes: float) -> None:
    """Writes a checkpoint of about so many gigabytes, part by part."""
    shape: dict[str, Any] = {
        "vocab_size": 65_536,
        "width": 2048,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 64,
        "mlp_width": 8192,
    }
    if gigabytes < 0.5:  # one that is written in a second
        shape |= {"vocab_size": 512, "width": 128, "heads": 8, "mlp_width": 256}
    one, two = (kvjax.Config.llama(layers=n, tie_embeddings=True, **shape) for n in (1, 2))
    first, second = (sum(2 * np.prod(x) for x in checkpoint.parameter_shapes(c).values()) for c in (one, two))
    layers = max(1, round((gigabytes * 1e9 - first) / (second - first)) + 1)
    config, rng = kvjax.Config.llama(layers=layers, tie_embeddings=True, **shape), np.random.default_rng(0)
    shapes = checkpoint.parameter_shapes(config)
    with checkpoint.Writer(directory, config, "bfloat16", "random") as writer:
        for name in checkpoint.part_names(shapes):
            flat = {p: size for p, size in shapes.items() if p.split("/")[0] == name}
            tree: Any = {}
            for path, size in flat.items():
                *folders, leaf = path.split("/")
                node = tree
                for folder in folders:
                    node = node.setdefault(folder, {})
                node[leaf] = rng.standard_normal(size, np.float32) * size[0] ** -0.5
            writer.put(name, tree[name])


def restore_shards(directory: str, coordinator: str, index: int, count: int, sequences: int, heads: int) -> None:
    """Restores what this process of several holds, and prints what that took as JSON."""
    import jax
    import tensorstore  # so that the reading of libraries does not count

    if count > 1:
        processes.initialize(coordinator, (index + 1, count))
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(sequences, heads), ("data", "model"))
    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    del tensorstore
    before, start, read = peak_bytes(), time.perf_counter(), read_so_far()
    model = kvjax.load(Path(directory), mesh=mesh)
    jax.block_until_ready(model.params)
    seconds, read = time.perf_counter() - start, read_so_far() - read
    # A shard that several devices of a process hold is read once, and in memory as often.
    shards = [{str(s.index): s.data.nbytes for s in x.addressable_shards} for x in jax.tree.leaves(model.params)]
    copies = sum(s.data.nbytes for x in jax.tree.leaves(model.params) for s in x.addressable_shards)
    found = {"held": sum(sum(x.values()) for x in shards), "in memory": copies, "read": read, "before": before}
    print(json.dumps(found | {"peak": peak_bytes(), "seconds": seconds}))


def read_so_far() -> int:
    """Returns the bytes that this process's system calls have read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def measure(directory: Path, layout: str) -> list[dict[str, Any]]:
    """Restores the checkpoint in the processes of a layout; returns what each found."""
    count, sequences, heads = map(int, layout.split("x"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    flag = f"--xla_force_host_platform_device_count={sequences * heads // count}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}
    asked = ["--process", str(directory), coordinator, str(count), str(sequences), str(heads)]
    commands = [[sys.executable, "-m", "experiments.bench.restore", *asked, str(i)] for i in range(count)]
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, env=environment, text=True) for c in commands]
    answers = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"a process of layout {layout} failed")
    return [json.loads(answer.strip().splitlines()[-1]) for answer in answers]


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the checkpoint")
    parser.add_argument("--directory", type=Path, help="of a checkpoint; written first if it does not exist")
    parser.add_argument("--layouts", type=split_words, default=["1x1x1", "1x1x4", "2x1x4", "2x2x2"])
    parser.add_argument("--process", nargs=6, help="runs one process of a layout; the script itself passes it")
    args = parser.parse_args(argv)
    if args.process:
        directory, coordinator, *numbers = args.process
        count, sequences, heads, index = map(int, numbers)
        restore_shards(directory, coordinator, index, count, sequences, heads)
        return
    before, lines, results = machine(), [], []
    with tempfile.TemporaryDirectory() as folder:
        directory = args.directory or Path(folder) / "model"
        if not directory.exists():
            measuring.log_progress("writing the checkpoint")
            write_random(directory, args.gigabytes)
        stored = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
        for layout in args.layouts:
            measuring.log_progress(layout)
            for index, found in enumerate(measure(directory, layout), 1):
                beyond = found["peak"] - found["before"] - found["in memory"]
                results.append({"layout": layout, "process": index, "stored": stored, "beyond": beyond, **found})
                sizes = [f"{found[x] / 1e6:.0f}" for x in ("held", "read")]
                ratio, seconds = f"{found['read'] / found['held']:.2f}", f"{found['seconds']:.1f}"
                lines.append(
                    [layout, index, *sizes, ratio, f"{found['peak'] / 1e6:.0f}", f"{beyond / 1e6:.0f}", seconds]
                )
    title = f"Restore of a checkpoint of {stored / 1e6:.0f} MB, in MB"
    measuring.report("restore", before, [measuring.table(title, COLUMNS, lines)], [], results)


if __name__ == "__main__":
    main()
