"""Decode tokens per second of kvjax and of transformers' dynamic cache: same weights, threads, dtype; greedy.

python -m experiments.bench.decode [--models small,125m] [--contexts 512,4096] [--batches 1,4] [--methods "snapkv;int8"]

Both sides decode the same prompt in turns, a few tokens at a time. The limit is the rate that memory bandwidth allows
the method `full`: (bytes of weights, keys and values that a step must read) / bandwidth, the bandwidth measured between
the same turns. A model that fits the processor's caches can exceed it. Other methods are measured in the same turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from experiments.bench import measuring
from experiments.bench.decoders import (
    KvjaxDecoder,
    TransformersDecoder,
    missing_note,
    missing_packages,
    time_decode_steps,
)
from experiments.bench.shapes import SHAPES, decode_bytes, describe
from kvjax.eval.run.machine import machine

WARM_UP = 4  # decode steps before the first timed one; both sides must agree on their tokens


def measure(
    model: kvjax.Model,
    peer: TransformersDecoder | None,
    probes: measuring.Probes,
    context: int,
    batch: int,
    *,
    steps: int,
    repeats: int,
    methods: Sequence[str] = (),
) -> dict[str, Any]:
    """Measures one cell of the table: all sides on one prompt.

    Args:
      model: kvjax's model.
      peer: the same weights in transformers; None leaves them out.
      probes: of the machine's memory bandwidth.
      context: tokens of the prompt.
      batch: number of sequences.
      steps: tokens per turn.
      repeats: turns.
      methods: of kvjax, next to `full`.

    Returns:
      seconds per step and tokens per second by side; the limit of `full`, and its bytes and bandwidth.

    Raises:
      AssertionError: if the two sides choose different first tokens, and so do not compute the same function.
    """
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, context), np.int32)
    sides: dict[str, Any] = {method: KvjaxDecoder(model, kvjax.parse(method)) for method in ("full", *methods)}
    for side in sides.values():
        side.prefill(ids, room=WARM_UP + steps * repeats)
    if peer is not None:
        sides["transformers"] = peer
        peer.prefill(ids)
    for side in sides.values():
        side.decode(WARM_UP)
    # A side that computes something else could be faster for that reason alone. Only the first tokens have to agree,
    # since rounding decides the near ties that random weights give.
    if peer is not None:
        check_same_tokens(sides["full"], peer)

    size, reads = probes
    seconds = time_decode_steps(sides, steps, repeats, reads)
    # The best probe counts: medians of the sides are judged by the most that the memory gave in the same turns.
    bandwidth = size / min(min(seconds[name]) for name in reads)
    middle = context + WARM_UP + steps * repeats / 2  # the mean length of the timed steps
    need = decode_bytes(model.config, model.params, batch, middle)
    return {
        "batch": batch,
        "context": context,
        "seconds_per_step": {name: measuring.summary(seconds[name]) for name in sides},
        "tokens_per_second": {name: batch / measuring.summary(seconds[name])["median"] for name in sides},
        "bytes_per_step": need,
        "bandwidth": bandwidth,
        "limit": batch * bandwidth / need,
        # Recorded and not required: after one near tie, long greedy runs part for good.
        "same_tokens": None if peer is None else float((sides["full"].tokens == peer.tokens).mean()),
    }


def check_same_tokens(ours: Any, theirs: Any) -> None:
    """Raises AssertionError unless both sides have chosen the same tokens."""
    if not np.array_equal(ours.tokens, theirs.tokens):
        chosen = f"kvjax {ours.tokens.tolist()}, transformers {theirs.tokens.tolist()}"
        raise AssertionError(f"the first greedy tokens differ: {chosen}")


COLUMNS = ("model", "context", "batch", "method", "kvjax tok/s", "vs full", "transformers tok/s", "ratio")
COLUMNS += ("limit tok/s", "of limit", "MB/step", "GB/s")


def rows(name: str, cell: dict[str, Any]) -> list[list[Any]]:
    """Formats a cell, one row per method; only `full` has the limit."""
    rates = dict(cell["tokens_per_second"])
    theirs, full = rates.pop("transformers", None), rates["full"]
    limit = (f"{cell['limit']:.1f}", f"{full / cell['limit']:.0%}")
    limit += (f"{cell['bytes_per_step'] / 1e6:.1f}", f"{cell['bandwidth'] / 1e9:.1f}")
    lines = []
    for method, ours in rates.items():
        ratios = (f"{ours / full:.2f}x", theirs and f"{theirs:.1f}", theirs and f"{ours / theirs:.2f}x")
        limits = limit if method == "full" else [None] * len(limit)
        lines.append([name, cell["context"], cell["batch"], method, f"{ours:.1f}", *ratios, *limits])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--models", default=",".join(SHAPES), help="from: " + ", ".join(SHAPES))
    parser.add_argument("--contexts", type=measuring.parse_integers, default=[512, 4096], help="tokens of the prompt")
    parser.add_argument("--batches", type=measuring.parse_integers, default=[1, 4])
    parser.add_argument("--methods", default="", help='measured next to full, separated by ";"')
    parser.add_argument("--steps", type=int, default=16, help="tokens per turn")
    parser.add_argument("--repeats", type=int, default=9, help="turns; the table shows their median")
    parser.add_argument("--read-megabytes", type=int, default=512, help="size of the bandwidth probe")
    args = parser.parse_args(argv)

    before, notes, lines, results = machine(), [], [], []
    methods = args.methods.split(";") if args.methods else ()
    probes = measuring.read_probes(args.read_megabytes)
    for name in args.models.split(","):
        model = kvjax.random_model(SHAPES[name])
        notes.append(describe(name, model.config, model.params))
        peer = None if missing_packages() else TransformersDecoder(model)
        for context in args.contexts:
            for batch in args.batches:
                measuring.log_progress(f"{name}, context {context}, batch {batch}")
                cell = measure(
                    model, peer, probes, context, batch, steps=args.steps, repeats=args.repeats, methods=methods
                )
                results.append({"model": name, **cell})
                lines += rows(name, cell)
        # Compiled programs take memory mappings, and Linux gives a process 65,530.
        jax.clear_caches()
    measuring.report(
        "decode", before, [measuring.table("Decode, greedy", COLUMNS, lines)], notes + missing_note(), results
    )


if __name__ == "__main__":
    main()
