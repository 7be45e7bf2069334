"""Prefill and decode of one model in several dtypes, by kvjax and by transformers, in one run.

python -m experiments.bench.dtypes [--model smollm2-135m] [--dtypes float32,bfloat16] [--context 512] [--batches 1,4]

All sides read the same prompt in turns and then decode it in turns, a few tokens at a time, under the exact method
`full`. Figures are medians; the last two columns are ratios to kvjax in the first dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

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
from kvjax.eval.run.machine import machine
from kvjax.eval.tasks.suite import split_words

Side = tuple[str, str]
"""("kvjax" or "transformers", dtype)."""


def load_sides(model: str, dtypes: Sequence[str]) -> tuple[dict[Side, Any], kvjax.Config]:
    """Loads the model in every dtype; returns the decoders of both libraries and its configuration."""
    # All models are in memory at once: sides that ran one after the other would see different load.
    sides: dict[Side, Any] = {}
    for dtype in dtypes:
        loaded = kvjax.load(model, dtype=dtype)
        sides["kvjax", dtype] = KvjaxDecoder(loaded, kvjax.methods.full())
        if not missing_packages():
            sides["transformers", dtype] = TransformersDecoder(loaded)
    return sides, loaded.config


def measure(
    sides: Mapping[Side, Any], vocabulary: int, context: int, batch: int, steps: int, repeats: int
) -> dict[Side, dict[str, float]]:
    """Median seconds of a prefill of i32[batch, context], and decoded tokens per second, of each side."""
    ids = np.random.default_rng(0).integers(0, vocabulary, (batch, context), np.int32)
    room = steps * (repeats + 1)
    for side in sides.values():  # compiles
        side.prefill(ids, room=room)
        side.decode(steps)
    # Each prefill begins a new cache, and decoding goes on from the last one, whose room covers all turns.
    runs = {name: functools.partial(side.prefill, ids, room=room) for name, side in sides.items()}
    prefill = measuring.time_in_turns(runs, repeats)
    decode = time_decode_steps(sides, steps, repeats)
    return {
        name: {
            "prefill_seconds": measuring.summary(prefill[name])["median"],
            "tokens_per_second": batch / measuring.summary(decode[name])["median"],
        }
        for name in sides
    }


COLUMNS = ("batch", "side", "dtype", "prefill s", "decode tok/s", "prefill, times", "decode, times")


def rows(batch: int, cell: Mapping[Side, Mapping[str, float]]) -> list[list[Any]]:
    """Formats the results of a batch size, one row per side."""
    first = next(iter(cell.values()))
    lines = []
    for (name, dtype), found in cell.items():
        slower = found["prefill_seconds"] / first["prefill_seconds"]
        faster = found["tokens_per_second"] / first["tokens_per_second"]
        cells = (f"{found['prefill_seconds']:.2f}", f"{found['tokens_per_second']:.1f}")
        lines.append([batch, name, dtype, *cells, f"{slower:.2f}x", f"{faster:.2f}x"])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="what kvjax.load opens")
    parser.add_argument("--dtypes", type=split_words, default=["float32", "bfloat16"])
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--batches", type=measuring.parse_integers, default=[1, 4])
    parser.add_argument("--steps", type=int, default=8, help="tokens per turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns; the table shows their median")
    args = parser.parse_args(argv)
    before, lines, results = machine(), [], []
    sides, config = load_sides(args.model, args.dtypes)
    for batch in args.batches:
        measuring.log_progress(f"batch {batch}")
        cell = measure(sides, config.vocab_size, args.context, batch, args.steps, args.repeats)
        lines += rows(batch, cell)
        results += [{"batch": batch, "side": name, "dtype": dtype, **found} for (name, dtype), found in cell.items()]
    title = f"{args.model}, {args.context} tokens, method full"
    measuring.report("dtypes", before, [measuring.table(title, COLUMNS, lines)], missing_note(), results)


if __name__ == "__main__":
    main()
