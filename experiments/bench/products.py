"""Bytes of weights per second in products of a few rows, as XLA's CPU backend multiplies and without packing weights.

python -m experiments.bench.products [--shapes 768x2048,2048x768] [--rows 1,2,4,8,16,32,64] [--dtypes float32,bfloat16]

A program multiplies x [rows in] with one weight matrix [in out] after another, together too large for the caches, as a
decode step does; both programs take turns. On this rest the rows for which `kvjax.core.product.options` tells the
compiler not to pack.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.common import integers, interleaved, machine, progress, report, summary, table, timed
from kvjax.core.product import WITHOUT_PACKING

Shape = tuple[int, int]
PROGRAMS = {"packed": None, "not packed": WITHOUT_PACKING}


def shapes(text: str) -> list[Shape]:
    """Comma-separated sizes, in x out."""
    return [tuple(map(int, word.split("x"))) for word in text.split(",")]


def through(x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
    """f32[], the sum of x [T in] times each of the weights [in out]; not in a loop, which would copy each of them."""
    total = jnp.float32(0)
    for w in weights:
        # The sum is added to x, so that no product can be computed before the last one is done.
        total += jnp.sum(jnp.dot(x + (total * 1e-30).astype(x.dtype), w), dtype=jnp.float32)
    return total


def measure(shape: Shape, rows: int, dtype: jnp.dtype, megabytes: int, repeats: int) -> dict[str, Any]:
    """Seconds of both programs, and the bytes of weights that each reads."""
    count = max(1, megabytes * 2**20 // (shape[0] * shape[1] * dtype.itemsize))
    weights, x = [jnp.ones(shape, dtype) for _ in range(count)], jnp.ones((rows, shape[0]), dtype)
    lowered = jax.jit(through).lower(x, weights)
    programs = {name: lowered.compile(compiler_options=options) for name, options in PROGRAMS.items()}
    runs = {name: (lambda program=program: timed(program, x, weights)) for name, program in programs.items()}
    interleaved(runs, 1)
    seconds = {name: summary(found) for name, found in interleaved(runs, repeats).items()}
    return {
        "shape": shape,
        "rows": rows,
        "dtype": dtype.name,
        "bytes": sum(w.nbytes for w in weights),
        "seconds": seconds,
    }


COLUMNS = ("weights", "dtype", "rows", *(f"{name}, GB/s" for name in PROGRAMS), "not packed beside packed")


def row(cell: dict[str, Any]) -> list[Any]:
    """A cell as a line of the table."""
    rates = [cell["bytes"] / cell["seconds"][name]["median"] / 1e9 for name in PROGRAMS]
    size = " x ".join(map(str, cell["shape"]))
    return [size, cell["dtype"], cell["rows"], *(f"{rate:.1f}" for rate in rates), f"{rates[1] / rates[0]:.2f}x"]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=shapes, default="768x2048,2048x768,576x1536", help="in x out")
    parser.add_argument("--rows", type=integers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--megabytes", type=int, default=256, help="of weights that one turn reads")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)

    before, results = machine(), []
    for dtype in map(jnp.dtype, args.dtypes.split(",")):
        for shape in args.shapes:
            progress(f"{shape[0]} x {shape[1]}, {dtype.name}")
            results += [measure(shape, rows, dtype, args.megabytes, args.repeats) for rows in args.rows]
    lines = [row(cell) for cell in results]
    report("products", before, [table("Products of a few rows", COLUMNS, lines)], [], results)


if __name__ == "__main__":
    main()
