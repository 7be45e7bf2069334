"""Peak memory of loading a model, reading a prompt and decoding, against the bytes of weights and cache.

python -m experiments.bench.memory [--models smollm2-135m,125m] [--dtypes float32,bfloat16] [--tokens 1024]

Each row comes from a process of its own. "Beyond" is the peak minus the memory before loading, the weights and the
cache: the workspace, with compiled programs. A model that is stored in another dtype is converted while it loads; a
second copy of the weights would show there. `125m` is a random model, saved in float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvjax
from experiments.bench import measuring
from experiments.bench.process import peak_bytes, run_in_process
from experiments.bench.shapes import SHAPES
from kvjax.eval.run.machine import machine
from kvjax.eval.tasks.suite import split_words
from kvjax.models import checkpoint

NEW_TOKENS = 16
STAGES = ("loaded", "read", "decoded")


def measure_peaks(model: str, dtype: str, tokens: int) -> dict[str, int]:
    """Bytes of this process before loading, its peak after each stage, and the bytes of weights and cache."""
    jax.block_until_ready(jax.numpy.zeros(1) + 1)  # the backend itself counts as "before"
    found = {"before": peak_bytes()}
    loaded = jax.block_until_ready(kvjax.load(model, dtype=dtype))
    found["loaded"] = peak_bytes()
    ids = np.random.default_rng(0).integers(0, loaded.config.vocab_size, (1, tokens), np.int32)
    # Under another method, its workspace could hide a second copy of the weights.
    context = kvjax.read(loaded, ids, "full", headroom=NEW_TOKENS)
    found["read"] = peak_bytes()
    context.generate(max_new_tokens=NEW_TOKENS, eos_ids=())
    found["decoded"] = peak_bytes()
    found["weights"] = sum(x.nbytes for x in jax.tree.leaves(loaded.params))
    found["cache"] = sum(kvjax.state_bytes(context.cache).total.values())
    return found


def row(model: str, dtype: str, tokens: int, found: dict[str, int]) -> list[Any]:
    """Formats the results of one process, in MB."""
    held = found["before"] + found["weights"]
    expected = {"loaded": held, "read": held + found["cache"], "decoded": held + found["cache"]}
    peaks = [found[stage] for stage in STAGES]
    beyond = [found[stage] - expected[stage] for stage in STAGES]
    sizes = [found["before"], found["weights"], found["cache"], *peaks, *beyond]
    return [model, dtype, tokens, *(f"{size / 1e6:.0f}" for size in sizes)]


COLUMNS = ("model", "dtype", "tokens", "before", "weights", "cache", *(f"peak, {stage}" for stage in STAGES))
COLUMNS += tuple(f"beyond, {stage}" for stage in STAGES)


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument(
        "--models", type=split_words, default=["smollm2-135m", "125m"], help="names, checkpoints or shapes"
    )
    parser.add_argument("--dtypes", type=split_words, default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=1024, help="of the prompt")
    args = parser.parse_args(argv)
    before, lines, results = machine(), [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            where = name
            if name in SHAPES:
                # Through a file, since a random model would be made in its dtype, and nothing converted.
                where = str(Path(folder) / name)
                random = kvjax.random_model(SHAPES[name])
                checkpoint.save(where, random.config, random.params)
            for dtype in args.dtypes:
                measuring.log_progress(f"{name}, {dtype}")
                found = run_in_process(measure_peaks, where, dtype, args.tokens)
                results.append({"model": name, "dtype": dtype, "tokens": args.tokens, **found})
                lines.append(row(name, dtype, args.tokens, found))
    measuring.report("memory", before, [measuring.table("Peak memory of a process, MB", COLUMNS, lines)], [], results)


if __name__ == "__main__":
    main()
