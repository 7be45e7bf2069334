"""Decode tokens per second on a GPU: methods of kvjax beside transformers, and batches that fit equal memory.

python -m experiments.gpu.decode --model 1b --cells "32768x1; 32768x8" [--methods "full; kcache:n=128"]
python -m experiments.gpu.decode --model 8b --cells 8192 --memory-gb 4 [--host-gb 48]

A cell is a context and a batch, or, with --memory-gb, a context at which each method takes the largest batch whose
cache fits so many GB of the device, and --host-gb of the host. Caches hold random keys and values, in bfloat16, and no
prompt is run; the weights are those of both libraries. Methods of a cell take turns, and each line of results is
written as soon as it is measured. The bound is what an exact step must read over the bandwidth of a copy on the device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench import measuring
from experiments.bench.decoders import KvjaxDecoder, missing_packages, random_loop, time_decode_steps
from experiments.bench.shapes import decode_bytes
from experiments.gpu.models import SHAPES, TorchDecoder, fill_model
from kvjax import KvjaxError
from kvjax.eval.run.machine import machine

# Eviction by the keys alone: the caches are random, and there are no queries to observe.
METHODS = "full; int8; kivi:bits=2,group=64,residual=128; keydiff:budget=25%; quest:budget=1024; kcache:n=128; "
METHODS += "specache:bits=2,group=64,residual=128"


def fit_batch(method: str, config: kvjax.Config, context: int, room: int, device: float, host: float) -> int:
    """The largest batch whose allocated cache fits the bytes of device and host."""
    row = kvjax.planned_bytes(method, config, context, capacity=context + room, dtype="bfloat16").total
    limits = [device // row["device"], *([host // row["pinned_host"]] if row["pinned_host"] else [])]
    return int(min(limits))


def prepare(model: kvjax.Model, cell: Sequence[tuple[str, int]], context: int, room: int, steps: int, workers: int):
    """Decode loops of all methods, compiled; a method that fails has its error in the place of its loop."""

    def make(of: tuple[str, int]) -> KvjaxDecoder | str:
        method, batch = of
        try:
            start = time.perf_counter()
            loop = random_loop(model, method, batch, context, room)
            built = time.perf_counter() - start
            loop.decode(steps)
            measuring.log_progress(
                f"{method} x{batch}: {built:.0f} s to fill, {time.perf_counter() - start:.0f} s in all"
            )
            return loop
        except Exception as e:  # a method that fails must not hide the others
            measuring.log_progress(f"{method} x{batch} fails: {type(e).__name__}: {str(e)[:300]}")
            return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:300]}"

    # XLA compiles without Python's lock, and a program of all layers takes it tens of seconds.
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(make, cell))


def copy_bandwidth(megabytes: int) -> float:
    """Bytes per second that a copy on the device reads and writes."""
    x = jnp.ones((megabytes * 2**18,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    best = min(measuring.time_run(copy, x) for _ in range(12))
    return 2 * x.nbytes / best


COLUMNS = ("context", "batch", "method", "tok/s", "ms/step", "cache GB", "host GB", "of exact bound", "error")


def format_row(record: dict[str, Any]) -> list[Any]:
    """Formats the record of one method in one cell."""
    about = [f"{record['context']:,}", record["batch"], record["method"]]
    if "error" in record:
        return [*about, *[None] * 5, record["error"][:70]]
    rate, sizes = record["tokens_per_second"], record.get("bytes", {})
    gigabytes = [f"{sizes[kind] / 1e9:.2f}" if kind in sizes else None for kind in ("device", "pinned_host")]
    bound = record["batch"] * record["copy_bandwidth"] / record["exact_bytes"]
    return [*about, f"{rate:,.1f}", f"{record['batch'] / rate * 1e3:.2f}", *gigabytes, f"{rate / bound:.0%}", ""]


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="1b")
    parser.add_argument("--cells", default="4096x1; 32768x1; 32768x8")
    parser.add_argument("--methods", default=METHODS, help='separated by ";"')
    parser.add_argument("--memory-gb", type=float, help="equal memory for the caches, in GB; cells are contexts then")
    parser.add_argument("--host-gb", type=float, default=48.0, help="host memory for the caches, in GB")
    parser.add_argument("--steps", type=int, default=16, help="tokens per turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns; the table shows their median")
    parser.add_argument("--workers", type=int, default=8, help="programs that are compiled at once")
    parser.add_argument("--compile-only", action="store_true", help="fills JAX's cache of programs, and times nothing")
    parser.add_argument("--probe-megabytes", type=int, default=4096, help="of the copy that measures bandwidth")
    parser.add_argument("--no-torch", action="store_true", help="leaves transformers out")
    parser.add_argument("--write", type=measuring.output_file, help="appends each cell to this file as a line of JSON")
    args = parser.parse_args(argv)
    before, config = machine(), SHAPES[args.model]
    model = fill_model(config, jnp.bfloat16)
    bandwidth = copy_bandwidth(args.probe_megabytes)
    measuring.log_progress(f"{args.model} is filled; {bandwidth / 1e9:,.0f} GB/s")
    peer, agreement = None, None
    if not args.no_torch and not missing_packages():
        peer = TorchDecoder(model)
        ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, 256), np.int32)
        logits, _ = kvjax.prefill(model, ids, "full")
        theirs = peer.logits(ids)
        agreement = float(np.linalg.norm(np.asarray(logits) - theirs) / np.linalg.norm(theirs))
        measuring.log_progress(f"logits of kvjax and transformers differ by {agreement:.2%} of their norm")
    room, results, lines = args.steps * (args.repeats + 1), [], []
    for text in args.cells.split(";"):
        context, _, batch = text.strip().partition("x")
        context = int(context)
        methods = [method.strip() for method in args.methods.split(";")]
        if args.memory_gb:
            sizes = args.memory_gb * 1e9, args.host_gb * 1e9
            cell = [(method, fit_batch(method, config, context, room, *sizes)) for method in methods]
        else:
            cell = [(method, int(batch)) for method in methods]
        cell = [(method, size) for method, size in cell if size]
        if not cell:
            raise KvjaxError(
                f"no method's cache of {context:,} tokens fits {args.memory_gb:g} GB; give more --memory-gb"
            )
        made = prepare(model, cell, context, room, args.steps, args.workers)
        if args.compile_only:
            del made
            continue
        loops: dict[Any, Any] = {of: x for of, x in zip(cell, made, strict=True) if not isinstance(x, str)}
        torch_batch = cell[0][1]
        if peer is not None:
            peer.begin(torch_batch, context)
            peer.decode(2)
            loops["transformers", torch_batch] = peer
        seconds = time_decode_steps(loops, args.steps, args.repeats)
        sides = [*zip(cell, made, strict=True), *([(("transformers", torch_batch), peer)] if peer else [])]
        for (method, size), side in sides:
            record: dict[str, Any] = {"model": args.model, "context": context, "method": method, "batch": size}
            if isinstance(side, str):
                record["error"] = side
            else:
                step = measuring.summary(seconds[method, size])
                need = decode_bytes(config, model.params, size, context + room / 2)
                record |= {"seconds_per_step": step, "tokens_per_second": size / step["median"], "exact_bytes": need}
                if side is not peer:
                    record["bytes"] = kvjax.state_bytes(side.cache).total
            record |= {"copy_bandwidth": bandwidth, "memory_gb": args.memory_gb, "logits_differ": agreement}
            results.append(record)
            if args.write:
                with args.write.open("a") as file:
                    print(json.dumps(record), file=file)
            lines.append(format_row(record))
        # Caches of the next cell need the memory.
        del loops, made, sides, side
        if peer is not None:
            peer.cache = None
        jax.clear_caches()
    title = f"Decode of {args.model}, bfloat16, random weights and caches"
    if args.memory_gb:
        title += f"; caches of at most {args.memory_gb:g} GB on the device"
    notes = [f"A copy on the device reads and writes {bandwidth / 1e9:,.0f} GB/s."]
    if agreement is not None:
        notes.append(f"Logits of a prompt differ from transformers' by {agreement:.2%} of their norm.")
    measuring.report("gpu_decode", before, [measuring.table(title, COLUMNS, lines)], notes, results)


if __name__ == "__main__":
    main()
