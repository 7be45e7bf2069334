"""Every method on this machine's GPU against the same method on its CPU: tokens and their log-probabilities.

python -m experiments.gpu.methods [--dtype float32] [--methods "kivi;kcache"] [--workers 8] [--reference FILE]

Each method runs on small random weights, with prompts long enough that tokens leave; GPU products are in full float32.
A method whose greedy tokens equal the CPU's agrees; where they part, a near tie has been decided the other way if the
two likeliest tokens differ by less than TIE in the log-probability of both machines, and else the method is wrong. The
CPU's side is computed by processes that see no GPU; --reference reads it from FILE, or writes it there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvjax
from experiments.bench import measuring
from kvjax import KvjaxError
from kvjax.eval.run.machine import machine
from kvjax.registry.loading import load_all
from kvjax.testing import toy_model
from kvjax.testing.preparation import prepare

PROMPT_LENGTHS, NEW_TOKENS = (120, 77), 16
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.15}
"""Largest difference of a log-probability. Methods round keys to few bits, and a sum in another order may round one
number to the next code, so that this is wider than the arithmetic alone would need."""
TIE = {"float32": 2e-3, "bfloat16": 0.15}

Run = dict[str, Any]  # "tokens", "logprobs", "top", or "error"; "seconds"


def run_method(name: str, dtype: str) -> Run:
    """Decodes two prompts greedily under a method; an error becomes part of the result."""
    start = time.perf_counter()
    try:
        found = _decode(name, dtype)
    except KvjaxError as e:
        found = {"error": f"KvjaxError: {e}"}
    except Exception as e:  # one method that fails must not hide what the others do
        found = {"error": f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:300]}"}
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def _decode(name: str, dtype: str) -> Run:
    length = max(PROMPT_LENGTHS)
    # Heads of 32 channels, which the kernels read; a method that needs a table is measured on the shipped model.
    model = toy_model(head_dim=32, width=64, layers=4)
    try:
        prepared = prepare(name, model, length)
    except KvjaxError:
        prepared = prepare(name, None, length)
    model = prepared.model
    model = kvjax.Model(model.config, jax.tree.map(lambda x: x.astype(dtype), model.params), name=model.name)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, model.config.vocab_size, n).tolist() for n in PROMPT_LENGTHS]
    out = kvjax.generate(model, prompts, prepared.method, max_new_tokens=NEW_TOKENS, eos_ids=(), logprobs=2)
    return {
        "method": prepared.name,
        "tokens": out.tokens,
        "logprobs": out.logprobs,
        # How much the likeliest token is ahead of the second.
        "lead": [[step[0].logprob - step[1].logprob for step in row] for row in out.top_logprobs],
    }


def compare(ours: Run, theirs: Run, dtype: str) -> dict[str, Any]:
    """Compares a GPU's run with a CPU's: the verdict, the largest difference of a log-probability, equal tokens."""
    errors = [run.get("error") for run in (ours, theirs)]
    if any(errors):
        same = errors[0] == errors[1]
        return {
            "verdict": "refused on both" if same else "FAILS",
            "error": errors[0] or f"only on the CPU: {errors[1]}",
        }
    worst, num_equal, num_tokens, verdict = 0.0, 0, 0, "agrees"
    for i, (our_tokens, their_tokens) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        is_equal = [x == y for x, y in zip(our_tokens, their_tokens, strict=True)]
        shared = is_equal.index(False) if False in is_equal else len(is_equal)
        num_equal, num_tokens = num_equal + shared, num_tokens + len(is_equal)
        logprobs = zip(ours["logprobs"][i][:shared], theirs["logprobs"][i][:shared], strict=True)
        worst = max([worst, *(abs(x - y) for x, y in logprobs)])
        # Beyond the first token that differs the two decode different texts, and nothing is comparable.
        if shared < len(is_equal):
            is_tie = max(ours["lead"][i][shared], theirs["lead"][i][shared]) < TIE[dtype]
            verdict = "agrees up to a tie" if is_tie and verdict != "DIFFERS" else "DIFFERS"
    if not worst <= TOLERANCE[dtype]:
        verdict = "DIFFERS"
    return {"verdict": verdict, "worst": worst, "equal_tokens": f"{num_equal}/{num_tokens}"}


def run_in_workers(names: Sequence[str], dtype: str, workers: int, seconds: float, on_cpu: bool) -> dict[str, Run]:
    """Runs methods in several processes at once, since compiling takes nearly all of the time."""
    environment = os.environ | {
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "KVJAX_COMPILATION_CACHE": "0",
        # Tuning of products is for speed, and these run for microseconds.
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0",
        **({"JAX_PLATFORMS": "cpu"} if on_cpu else {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.jsonl" for i in range(workers)]
        command = [sys.executable, "-m", "experiments.gpu.methods", "--dtype", dtype]
        started = [
            subprocess.Popen(
                [*command, "--methods", ";".join(names[i::workers]), "--write", str(file)], env=environment
            )
            for i, file in enumerate(files)
            if names[i::workers]
        ]
        end = time.monotonic() + seconds
        for process in started:
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
        lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    found = {name: run for line in lines for name, run in json.loads(line).items()}
    missing = {"error": "its process was killed, or had no time left", "seconds": 0.0}
    return {name: found.get(name, missing) for name in names}


COLUMNS = ("method", "verdict", "worst", "equal tokens", "s", "error")


def row(name: str, r: Mapping[str, Any]) -> list[Any]:
    """Formats the comparison of one method."""
    worst = f"{r['worst']:.1e}" if "worst" in r else None
    return [name, r["verdict"], worst, r.get("equal_tokens"), r["seconds"], (r.get("error") or "")[:110]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--methods", help='separated by ";" (default: all)')
    parser.add_argument("--workers", type=int, default=8, help="processes at once on the GPU, and then on the CPU")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which processes are ended")
    parser.add_argument("--reference", type=measuring.output_file, help="the CPU's results")
    parser.add_argument(
        "--write", type=measuring.output_file, help="run the methods in this process, and write a line for each here"
    )
    args = parser.parse_args(argv)
    names = args.methods.split(";") if args.methods else list(load_all())
    if args.write:
        with args.write.open("a") as file:
            for name in names:
                print(json.dumps({name: run_method(name, args.dtype)}), file=file, flush=True)
        return
    before = machine()
    reference = json.loads(args.reference.read_text()) if args.reference and args.reference.exists() else {}
    known = reference.setdefault(args.dtype, {})
    if lacking := [name for name in names if name not in known]:
        measuring.log_progress(f"{len(lacking)} methods on the CPU")
        known |= run_in_workers(lacking, args.dtype, args.workers, args.seconds, on_cpu=True)
        if args.reference:
            args.reference.write_text(json.dumps(reference))
    measuring.log_progress(f"{len(names)} methods on {before['device']}")
    runs = run_in_workers(names, args.dtype, args.workers, args.seconds, on_cpu=False)
    found = {n: compare(runs[n], known[n], args.dtype) | {"seconds": runs[n]["seconds"]} for n in names}
    # Methods that differ come first.
    order = sorted(found, key=lambda n: (found[n]["verdict"].islower(), n))
    title = f"Methods on {before['device']} against its CPU, {args.dtype}"
    measuring.report(
        "gpu_methods", before, [measuring.table(title, COLUMNS, [row(n, found[n]) for n in order])], [], found
    )


if __name__ == "__main__":
    main()
