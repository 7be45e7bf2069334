"""Prefill of a long prompt beside transformers', in one run, and the peak memory of a very long one.

python -m experiments.bench.prefill [--models small,125m] [--tokens 4096] [--batch 1] [--methods "accumulated;snapkv"]
python -m experiments.bench.prefill --long [--model testbed] [--tokens 32768] [--chunk 2048]

The first form gives seconds, FLOP/s (causal attention counted half) and the share of what a large matrix product
reaches between the same turns, in the faster of JAX and torch; other methods are measured beside `full`. The second
runs the prompt in a process of its own, once whole and once in chunks, and gives that process's peak memory beside
what it held before the prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from experiments.bench.decoders import KvjaxDecoder, TransformersDecoder, missing_packages
from experiments.bench.measuring import (
    Probes,
    log_progress,
    machine,
    product_probes,
    report,
    summary,
    table,
    time_in_turns,
)
from experiments.bench.process import alone, peak_bytes
from experiments.bench.shapes import SHAPES, describe, prefill_flops


def measure(
    model: kvjax.Model,
    peer: TransformersDecoder | None,
    probes: Probes,
    tokens: int,
    batch: int,
    repeats: int,
    methods: Sequence[str] = (),
) -> dict[str, Any]:
    """Both sides on one prompt i32[batch, tokens], ours under the exact method `full` and under others."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, tokens), np.int32)
    sides: dict[str, Any] = {method: KvjaxDecoder(model, kvjax.parse(method)) for method in ("full", *methods)}
    if peer is not None:
        sides["transformers"] = peer
    for side in sides.values():
        side.prefill(ids)
    if peer is not None and not np.array_equal(sides["full"].tokens, peer.tokens):
        raise AssertionError("the first greedy tokens differ: both sides do not compute the same thing")
    operations, products = probes
    runs = {name: (lambda side=side: side.prefill(ids)) for name, side in sides.items()}
    seconds = time_in_turns({**runs, **products}, repeats)
    need = prefill_flops(model.config, model.params, batch, tokens)
    return {
        "batch": batch,
        "tokens": tokens,
        "seconds": {name: summary(seconds[name]) for name in runs},
        "flops": need,
        "flops_per_second": {name: need / summary(seconds[name])["median"] for name in runs},
        "product_flops_per_second": {name: operations / min(seconds[name]) for name in products},
    }


COLUMNS = ("model", "batch", "tokens", "side", "seconds", "best", "GFLOP/s", "of a product", "time of peer's")


def rows(name: str, cell: dict[str, Any]) -> list[list[Any]]:
    """A cell as lines of the table, one per side."""
    top = max(cell["product_flops_per_second"].values())
    peer = cell["seconds"].get("transformers")
    lines = []
    for side, s in cell["seconds"].items():
        rate = cell["flops_per_second"][side]
        share = f"{s['median'] / peer['median']:.2f}x" if peer else None
        cells = (f"{s['median']:.3f}", f"{s['best']:.3f}", f"{rate / 1e9:.0f}", f"{rate / top:.0%}", share)
        lines.append([name, cell["batch"], cell["tokens"], side, *cells])
    return lines


def beside_peer(args: argparse.Namespace) -> None:
    """The first form."""
    before, lines, shown, results = machine(), [], [], []
    probes = product_probes(args.product)
    for name in args.models.split(","):
        model = kvjax.random_model(SHAPES[name])
        lines.append(describe(name, model.config, model.params))
        log_progress(f"{name}, {args.tokens or 4096} tokens")
        peer = None if missing_packages() else TransformersDecoder(model)
        methods = args.methods.split(";") if args.methods else ()
        cell = measure(model, peer, probes, args.tokens or 4096, args.batch, args.repeats, methods)
        results.append({"model": name, **cell})
        shown += rows(name, cell)
        best = ", ".join(f"{k} {v / 1e9:.0f}" for k, v in cell["product_flops_per_second"].items())
        lines.append(f"{name}: {args.product} x {args.product} float32, best GFLOP/s: {best}")
        jax.clear_caches()
    if missing_packages():
        lines.append(f"transformers is left out: not installed: {missing_packages()} (pip install 'kvjax[parity]').")
    report("prefill", before, [table("Prefill", COLUMNS, shown)], lines, results)


def long_prompt(model: str, tokens: int, chunk: int | None) -> dict[str, Any]:
    """Seconds, and bytes of memory; runs in a process of its own."""
    m = kvjax.load(model)
    ids = np.random.default_rng(0).integers(0, min(256, m.config.vocab_size), (1, tokens), np.int32)
    kvjax.prefill(m, ids[:, :64], kvjax.methods.full())  # what the library itself needs belongs to "before"
    before, seconds = peak_bytes(), []
    for _ in range(2):  # the second time without compilation
        side = KvjaxDecoder(m, kvjax.methods.full())
        seconds.append(side.prefill(ids, chunk=chunk))
    state = kvjax.state_bytes(side.cache).total
    one = 4 * m.config.heads * tokens**2
    return {"seconds": seconds[-1], "before": before, "peak": peak_bytes(), "state": state, "s_by_s": one}


LONG_COLUMNS = (
    "tokens",
    "chunk",
    "seconds",
    "MB before",
    "MB peak",
    "MB of KV state",
    "MB of one layer's S x S scores",
)


def very_long(args: argparse.Namespace) -> None:
    """The second form."""
    before, results, lines, tokens = machine(), [], [], args.tokens or 32_768
    for chunk in (None, args.chunk):
        log_progress(f"{args.model}, {tokens} tokens, chunk {chunk}")
        r = alone(long_prompt, args.model, tokens, chunk)
        results.append({"model": args.model, "tokens": tokens, "chunk": chunk, **r})
        mega = (f"{x / 1e6:.0f}" for x in (r["before"], r["peak"], sum(r["state"].values()), r["s_by_s"]))
        lines.append([tokens, chunk, f"{r['seconds']:.2f}", *mega])
    report("prefill-long", before, [table(f"Prefill of {args.model}", LONG_COLUMNS, lines)], [], results)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help="from: " + ", ".join(SHAPES))
    parser.add_argument("--tokens", type=int, help="tokens of the prompt: 4096, or 32768 with --long")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--methods", default="", help='measured beside full, separated by ";"')
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--product", type=int, default=2048, help="size of the matrices whose product is the measure")
    parser.add_argument("--long", action="store_true", help="peak memory of a very long prompt")
    parser.add_argument("--model", default="testbed", help="with --long: what kvjax.load opens")
    parser.add_argument("--chunk", type=int, default=2048, help="with --long: tokens per chunk of the second run")
    args = parser.parse_args(argv)
    (very_long if args.long else beside_peer)(args)


if __name__ == "__main__":
    main()
