"""Decode time and bytes per step of low-bit caches and of the full cache, in one run, on random keys and values.

python -m experiments.bench.lowbit [--tokens 8192,32768] [--heads 8x4] [--methods "kivi:bits=2; specache:bits=1"]

All methods decode from a cache of the same length, in turns. "MB" counts the cache on the device, which a step of
`full` or `kivi` reads once; `full` is measured in float32 and bfloat16. "host costs" is a method's time minus the time
of the same method with everything on the device; it must not grow with the bytes on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

import kvjax
from experiments.bench import measuring
from experiments.bench.decoders import KvjaxDecoder, random_loop, time_decode_steps
from experiments.bench.shapes import describe
from kvjax.eval.run.machine import machine
from kvjax.registry.strings import resolve

METHODS = "full; kivi:bits=4; kivi:bits=2; kivi:bits=1; specache:bits=2; specache:bits=1"


def config(kv_heads: int, groups: int, head_dim: int) -> kvjax.Config:
    """Two layers so narrow that attention takes nearly all of their time."""
    heads = kv_heads * groups
    sizes = {"vocab_size": 256, "width": 256, "layers": 2, "mlp_width": 256, "max_positions": 2**20}
    return kvjax.Config.llama(heads=heads, kv_heads=kv_heads, head_dim=head_dim, **sizes)


def sides(models: dict[str, kvjax.Model], methods: Sequence[str], tokens: int, room: int) -> dict[str, KvjaxDecoder]:
    """One decode loop per method; methods that use host memory also with everything on the device."""
    loops = {}
    for text in methods:
        method = kvjax.parse(text)
        runs = {text: method}
        if method.traits.host:
            # Low bits cost instructions and host memory costs transfers; the twin on the device tells them apart.
            runs[f"{text}, on device"] = dataclasses.replace(method, k=method.k.on_device(), v=method.v.on_device())
        for name, m in runs.items():
            # Papers compress 16-bit numbers, so bytes have to be compared with these. CPUs without instructions for
            # bfloat16 are slower in it, so times are ratios to float32.
            for dtype in ("float32", "bfloat16") if text == "full" else ("float32",):
                label = f"{name}, {dtype}" if text == "full" else name
                loops[label] = random_loop(models[dtype], m, 1, tokens, room)
    return loops


def measure(
    models: dict[str, kvjax.Model], methods: Sequence[str], tokens: int, steps: int, repeats: int
) -> dict[str, Any]:
    """Seconds per step and bytes of the cache, by method."""
    loops = sides(models, methods, tokens, room=steps * (repeats + 1))
    for side in loops.values():
        side.decode(steps)
    seconds = time_decode_steps(loops, steps, repeats)
    # Bytes of the whole arrays, empty slots included: that is what a step of these programs reads.
    sizes = {name: kvjax.state_bytes(loop.cache).total for name, loop in loops.items()}
    return {name: {"seconds_per_step": measuring.summary(seconds[name]), "bytes": sizes[name]} for name in loops}


COLUMNS = ("method", "MB", "MB on host", "ms/step", "GB/s", "vs full", "host costs us")


def rows(cells: dict[str, Any]) -> list[list[Any]]:
    """Formats the results of one length; times are ratios to `full` in float32."""
    full, lines = cells["full, float32"]["seconds_per_step"]["median"], []
    for name, cell in cells.items():
        t, size = cell["seconds_per_step"]["median"], cell["bytes"]
        device = cells.get(f"{name}, on device")
        cost = f"{(t - device['seconds_per_step']['median']) * 1e6:+.0f}" if device else None
        read = size["device"] / t / 1e9
        sizes = (f"{size['device'] / 1e6:.1f}", f"{size['pinned_host'] / 1e6:.1f}")
        lines.append([name, *sizes, f"{t * 1e3:.2f}", f"{read:.1f}", f"{t / full:.2f}x", cost])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--tokens", type=measuring.parse_integers, default=[8192, 32768])
    parser.add_argument("--heads", default="8x4", help="key/value heads x query heads of each")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--methods", default=METHODS, help="next to full, separated by ';'")
    parser.add_argument("--steps", type=int, default=8, help="steps per turn")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)

    before = machine()
    shape = config(*map(int, args.heads.split("x")), args.head_dim)
    models = {d: kvjax.random_model(shape, dtype=jnp.dtype(d)) for d in ("float32", "bfloat16")}
    methods = list(resolve(["full", args.methods]))
    cells, tables = {}, []
    for tokens in args.tokens:
        measuring.log_progress(f"{tokens} tokens")
        cells[tokens] = measure(models, methods, tokens, args.steps, args.repeats)
        tables.append(measuring.table(f"{tokens:,} tokens, batch 1", COLUMNS, rows(cells[tokens])))
    results = [{"tokens": n, "methods": cell} for n, cell in cells.items()]
    measuring.report("lowbit", before, tables, [describe("model", shape, models["float32"].params)], results)


if __name__ == "__main__":
    main()
