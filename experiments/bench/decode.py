"""Decode tokens per second beside transformers' dynamic cache, in one run: same weights, threads, dtype, greedy.

python -m experiments.bench.decode [--models small,125m] [--contexts 512,4096] [--batches 1,4] [--method full]

Both sides decode the same prompt in turns, a few tokens at a time. The limit beside each figure is what the
machine's memory allows: (bytes of weights + keys and values that a step must read) / bandwidth, the bandwidth
measured between the same turns. A model that fits the processor's caches can pass it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from experiments.bench.common import integers, interleaved, machine, progress, report, summary, table
from experiments.bench.ours import Ours
from experiments.bench.peer import Peer, missing
from experiments.bench.probes import Probes, read_probes
from experiments.bench.shapes import SHAPES, decode_bytes, describe

WARM_UP = 4  # decode steps before the first timed one; both sides must agree on their tokens


def measure(
    model: kvjax.Model,
    method: kvjax.Method,
    peer: Peer | None,
    probes: Probes,
    context: int,
    batch: int,
    steps: int,
    repeats: int,
) -> dict[str, Any]:
    """One cell: both sides on one prompt i32[batch, context]; seconds are per step."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, context), np.int32)
    sides = {"kvjax": Ours(model, method)}
    sides["kvjax"].prefill(ids, room=WARM_UP + steps * repeats)
    if peer is not None:
        sides["transformers"] = peer
        peer.prefill(ids)
    for side in sides.values():
        side.decode(WARM_UP)
    if peer is not None and method == kvjax.zoo.full():
        same_tokens(sides)

    size, reads = probes
    runs = {name: (lambda side=side: side.decode(steps) / steps) for name, side in sides.items()}
    seconds = interleaved({**runs, **reads}, repeats)
    bandwidth = size / min(min(seconds[name]) for name in reads)
    middle = context + WARM_UP + steps * repeats / 2
    need = decode_bytes(model.config, model.params, batch, middle)
    return {
        "batch": batch,
        "context": context,
        "seconds_per_step": {name: summary(seconds[name]) for name in runs},
        "tokens_per_second": {name: batch / summary(seconds[name])["median"] for name in runs},
        "bytes_per_step": need,
        "bandwidth": bandwidth,
        "limit": batch * bandwidth / need,
        "same_tokens": agreement(sides),
    }


def same_tokens(sides: dict[str, Any]) -> None:
    """Raises unless both sides have chosen the same tokens: otherwise they do not compute the same thing."""
    ours, theirs = (side.tokens for side in sides.values())
    if not np.array_equal(ours, theirs):
        raise AssertionError(f"the first greedy tokens differ: kvjax {ours.tolist()}, transformers {theirs.tolist()}")


def agreement(sides: dict[str, Any]) -> float | None:
    """Share of equal tokens; long greedy runs of random weights may part at a near tie."""
    if len(sides) < 2:
        return None
    ours, theirs = (side.tokens for side in sides.values())
    return float((ours == theirs).mean())


def row(name: str, cell: dict[str, Any]) -> list[str | None]:
    """A cell as a line of the table."""
    rate = cell["tokens_per_second"]
    ours, theirs = rate["kvjax"], rate.get("transformers")
    return [
        name,
        cell["context"],
        cell["batch"],
        f"{ours:.1f}",
        theirs and f"{theirs:.1f}",
        theirs and f"{ours / theirs:.2f}x",
        f"{cell['limit']:.1f}",
        f"{ours / cell['limit']:.0%}",
        f"{cell['bytes_per_step'] / 1e6:.1f}",
        f"{cell['bandwidth'] / 1e9:.1f}",
    ]


COLUMNS = ("model", "context", "batch", "kvjax tok/s", "transformers tok/s", "ratio", "limit tok/s", "of limit")
COLUMNS += ("MB/step", "GB/s")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help="from: " + ", ".join(SHAPES))
    parser.add_argument("--contexts", type=integers, default=[512, 4096], help="tokens of the prompt")
    parser.add_argument("--batches", type=integers, default=[1, 4])
    parser.add_argument("--method", default="full", help="a kvjax method string")
    parser.add_argument("--steps", type=int, default=16, help="tokens per turn")
    parser.add_argument("--repeats", type=int, default=9, help="turns; the table shows their median")
    parser.add_argument("--read-megabytes", type=int, default=512, help="size of the bandwidth probe")
    args = parser.parse_args(argv)

    before, method, lines, rows, results = machine(), kvjax.parse(args.method), [], [], []
    probes = read_probes(args.read_megabytes)
    for name in args.models.split(","):
        model = kvjax.random_model(SHAPES[name])
        lines.append(describe(name, model.config, model.params))
        peer = None if missing() else Peer(model)
        for context in args.contexts:
            for batch in args.batches:
                progress(f"{name}, context {context}, batch {batch}")
                cell = measure(model, method, peer, probes, context, batch, args.steps, args.repeats)
                results.append({"model": name, "method": args.method, **cell})
                rows.append(row(name, cell))
        jax.clear_caches()
    if missing():
        lines.append(f"The transformers column is left out: not installed: {missing()} (pip install 'kvjax[parity]').")
    report("decode", before, [table(f"Decode, greedy, method {args.method}", COLUMNS, rows)], lines, results)


if __name__ == "__main__":
    main()
