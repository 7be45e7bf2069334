"""Prefill and decode of one model in several dtypes, beside transformers in the same ones, in one run.

python -m experiments.bench.dtypes [--model smollm2-135m] [--dtypes float32,bfloat16] [--context 512] [--batches 1,4]

All sides read the same prompt in turns and then decode it in turns, a few tokens at a time, under the exact method
`full`; figures are medians, and the last two columns stand beside kvjax in the first dtype.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import kvjax
from experiments.bench.common import integers, interleaved, machine, progress, report, summary, table
from experiments.bench.ours import Ours
from experiments.bench.peer import Peer, missing
from kvjax.eval.tasks.suite import split_words

Side = tuple[str, str]
"""(kvjax or transformers, dtype)."""


def sides_of(model: str, dtypes: Sequence[str]) -> tuple[dict[Side, Any], kvjax.Config]:
    """All sides, and the model's configuration."""
    sides: dict[Side, Any] = {}
    for dtype in dtypes:
        loaded = kvjax.load(model, dtype=dtype)
        sides["kvjax", dtype] = Ours(loaded, kvjax.methods.full())
        if not missing():
            sides["transformers", dtype] = Peer(loaded)
    return sides, loaded.config


def measure(
    sides: Mapping[Side, Any], vocabulary: int, context: int, batch: int, steps: int, repeats: int
) -> dict[Side, dict[str, float]]:
    """Of each side the median seconds of a prefill of i32[batch, context], and decoded tokens per second."""
    ids = np.random.default_rng(0).integers(0, vocabulary, (batch, context), np.int32)
    room = steps * (repeats + 1)

    def read(side: Any) -> float:
        return side.prefill(ids, room=room) if isinstance(side, Ours) else side.prefill(ids)

    for side in sides.values():  # compiled and warm
        read(side)
        side.decode(steps)
    prefill = interleaved({name: (lambda side=side: read(side)) for name, side in sides.items()}, repeats)
    decode = interleaved(
        {name: (lambda side=side: side.decode(steps) / steps) for name, side in sides.items()}, repeats
    )
    return {
        name: {
            "prefill_seconds": summary(prefill[name])["median"],
            "tokens_per_second": batch / summary(decode[name])["median"],
        }
        for name in sides
    }


COLUMNS = ("batch", "side", "dtype", "prefill s", "decode tok/s", "prefill, times", "decode, times")


def rows(batch: int, cell: Mapping[Side, Mapping[str, float]]) -> list[list[Any]]:
    """A batch as lines of the table, one per side."""
    first = next(iter(cell.values()))
    lines = []
    for (name, dtype), found in cell.items():
        slower = found["prefill_seconds"] / first["prefill_seconds"]
        faster = found["tokens_per_second"] / first["tokens_per_second"]
        cells = (f"{found['prefill_seconds']:.2f}", f"{found['tokens_per_second']:.1f}")
        lines.append([batch, name, dtype, *cells, f"{slower:.2f}x", f"{faster:.2f}x"])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="what kvjax.load opens")
    parser.add_argument("--dtypes", type=split_words, default=["float32", "bfloat16"])
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--batches", type=integers, default=[1, 4])
    parser.add_argument("--steps", type=int, default=8, help="tokens per turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns; the table shows their median")
    args = parser.parse_args(argv)
    before, shown, results = machine(), [], []
    sides, config = sides_of(args.model, args.dtypes)
    for batch in args.batches:
        progress(f"batch {batch}")
        cell = measure(sides, config.vocab_size, args.context, batch, args.steps, args.repeats)
        shown += rows(batch, cell)
        results += [{"batch": batch, "side": name, "dtype": dtype, **found} for (name, dtype), found in cell.items()]
    notes = []
    if missing():
        notes.append(f"transformers is left out: not installed: {missing()} (pip install 'kvjax[parity]').")
    title = f"{args.model}, {args.context} tokens, method full"
    report("dtypes", before, [table(title, COLUMNS, shown)], notes, results)


if __name__ == "__main__":
    main()
