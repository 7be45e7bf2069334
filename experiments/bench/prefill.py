"""Prefill of a long prompt by kvjax and by transformers, in one run, and the peak memory of a very long one.

python -m experiments.bench.prefill [--models small,125m] [--tokens 4096] [--batch 1] [--methods "accumulated;snapkv"]
python -m experiments.bench.prefill --long [--model testbed] [--tokens 32768] [--chunk 2048]

The first form gives seconds, FLOP/s (causal attention counts half), and their fraction of the FLOP/s of a large matrix
product between the same turns, in the faster of JAX and torch. --methods adds methods to `full`. The second form runs
the prompt in a process of its own, whole and in chunks, and gives the process's memory before the prompt and its peak.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from experiments.bench import measuring
from experiments.bench.decoders import KvjaxDecoder, TransformersDecoder, missing_note, missing_packages
from experiments.bench.process import peak_bytes, run_in_process
from experiments.bench.shapes import SHAPES, describe, prefill_flops
from kvjax.eval.run.machine import machine


def measure(
    model: kvjax.Model,
    peer: TransformersDecoder | None,
    probes: measuring.Probes,
    tokens: int,
    batch: int,
    *,
    repeats: int,
    methods: Sequence[str] = (),
) -> dict[str, Any]:
    """Measures both sides on one prompt i32[batch, tokens], kvjax under `full` and other methods.

    Raises:
      AssertionError: if the two sides choose different first tokens, and so do not compute the same function.
    """
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, tokens), np.int32)
    sides: dict[str, Any] = {method: KvjaxDecoder(model, kvjax.parse(method)) for method in ("full", *methods)}
    if peer is not None:
        sides["transformers"] = peer
    for side in sides.values():
        side.prefill(ids)
    if peer is not None and not np.array_equal(sides["full"].tokens, peer.tokens):
        raise AssertionError("the first greedy tokens differ: the sides do not compute the same function")
    # Arithmetic bounds a prefill, so a large product's rate is the measure; in `decode` it is the memory's.
    operations, products = probes
    runs = {name: functools.partial(side.prefill, ids) for name, side in sides.items()}
    seconds = measuring.time_in_turns({**runs, **products}, repeats)
    need = prefill_flops(model.config, model.params, batch, tokens)
    return {
        "batch": batch,
        "tokens": tokens,
        "seconds": {name: measuring.summary(seconds[name]) for name in runs},
        "flops": need,
        "flops_per_second": {name: need / measuring.summary(seconds[name])["median"] for name in runs},
        "product_flops_per_second": {name: operations / min(seconds[name]) for name in products},
    }


COLUMNS = ("model", "batch", "tokens", "side", "seconds", "best", "GFLOP/s", "of a product", "time of peer's")


def rows(name: str, cell: dict[str, Any]) -> list[list[Any]]:
    """Formats a cell, one row per side."""
    top = max(cell["product_flops_per_second"].values())
    peer = cell["seconds"].get("transformers")
    lines = []
    for side, s in cell["seconds"].items():
        rate = cell["flops_per_second"][side]
        ratio = f"{s['median'] / peer['median']:.2f}x" if peer else None
        cells = (f"{s['median']:.3f}", f"{s['best']:.3f}", f"{rate / 1e9:.0f}", f"{rate / top:.0%}", ratio)
        lines.append([name, cell["batch"], cell["tokens"], side, *cells])
    return lines


def measure_speed(args: argparse.Namespace) -> None:
    """Runs the first form."""
    before, notes, lines, results = machine(), [], [], []
    probes = measuring.product_probes(args.product)
    for name in args.models.split(","):
        model = kvjax.random_model(SHAPES[name])
        notes.append(describe(name, model.config, model.params))
        measuring.log_progress(f"{name}, {args.tokens or 4096} tokens")
        peer = None if missing_packages() else TransformersDecoder(model)
        methods = args.methods.split(";") if args.methods else ()
        cell = measure(model, peer, probes, args.tokens or 4096, args.batch, repeats=args.repeats, methods=methods)
        results.append({"model": name, **cell})
        lines += rows(name, cell)
        best = ", ".join(f"{k} {v / 1e9:.0f}" for k, v in cell["product_flops_per_second"].items())
        notes.append(f"{name}: {args.product} x {args.product} float32, best GFLOP/s: {best}")
        jax.clear_caches()
    measuring.report("prefill", before, [measuring.table("Prefill", COLUMNS, lines)], notes + missing_note(), results)


def run_long_prompt(model: str, tokens: int, chunk: int | None) -> dict[str, Any]:
    """Seconds and bytes of memory of one prompt; needs a process of its own."""
    m = kvjax.load(model)
    ids = np.random.default_rng(0).integers(0, min(256, m.config.vocab_size), (1, tokens), np.int32)
    kvjax.prefill(m, ids[:, :64], kvjax.methods.full())  # the library's own memory counts as "before"
    before, seconds = peak_bytes(), []
    for _ in range(2):  # the second time without compilation
        side = KvjaxDecoder(m, kvjax.methods.full())
        seconds.append(side.prefill(ids, chunk=chunk))
    state = kvjax.state_bytes(side.cache).total
    one_layer_scores = 4 * m.config.kind(0).attention.heads * tokens**2  # what attention without blocks would allocate
    return {"seconds": seconds[-1], "before": before, "peak": peak_bytes(), "state": state, "s_by_s": one_layer_scores}


LONG_COLUMNS = ("tokens", "chunk", "seconds", "MB before", "MB peak", "MB of KV cache", "MB of a layer's S x S scores")


def measure_memory(args: argparse.Namespace) -> None:
    """Runs the second form."""
    before, results, lines, tokens = machine(), [], [], args.tokens or 32_768
    for chunk in (None, args.chunk):
        # A peak never falls: in one process the second run would show the first one's.
        measuring.log_progress(f"{args.model}, {tokens} tokens, chunk {chunk}")
        r = run_in_process(run_long_prompt, args.model, tokens, chunk)
        results.append({"model": args.model, "tokens": tokens, "chunk": chunk, **r})
        mega = (f"{x / 1e6:.0f}" for x in (r["before"], r["peak"], sum(r["state"].values()), r["s_by_s"]))
        lines.append([tokens, chunk, f"{r['seconds']:.2f}", *mega])
    measuring.report(
        "prefill-long", before, [measuring.table(f"Prefill of {args.model}", LONG_COLUMNS, lines)], [], results
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--models", default=",".join(SHAPES), help="from: " + ", ".join(SHAPES))
    parser.add_argument("--tokens", type=int, help="tokens of the prompt: 4096, or 32768 with --long")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--methods", default="", help='measured next to full, separated by ";"')
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--product", type=int, default=2048, help="width of the matrix product that is the measure")
    parser.add_argument("--long", action="store_true", help="peak memory of a very long prompt")
    parser.add_argument("--model", default="testbed", help="with --long: what kvjax.load opens")
    parser.add_argument("--chunk", type=int, default=2048, help="with --long: tokens per chunk of the second run")
    args = parser.parse_args(argv)
    if args.long:
        measure_memory(args)
    else:
        measure_speed(args)


if __name__ == "__main__":
    main()
