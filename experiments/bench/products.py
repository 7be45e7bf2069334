"""Bytes of weights per second in products of a few rows: as XLA's CPU backend multiplies, without packing, in parts.

python -m experiments.bench.products [--shapes 768x2048,576x1536] [--rows 1,2,4,8,16,32,64] [--dtypes float32,bfloat16]

A program multiplies x [rows in] with a matrix [in out], what comes of it with one [out in], and so on with ever new
ones, together too large for the caches, as a decode step does; the programs take turns. The last one is
`kvjax.core.matmul.matmul`, which takes one row and a large matrix in parts. A whole step also has products that do
not wait for each other, so the log has whole models too.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.common import integers, interleaved, machine, progress, report, summary, table, timed
from kvjax.core.matmul import NO_PACKING, matmul
from kvjax.utils.arguments import float_type

PASSES = 8
Shape = tuple[int, int]
Multiply = Callable[[jax.Array, jax.Array], jax.Array]
PROGRAMS = {"packed": (jnp.matmul, None), "not packed": (jnp.matmul, NO_PACKING), "kvjax": (matmul, None)}
"""By name, what multiplies, and what the compiler is told."""


def shapes(text: str) -> list[Shape]:
    """Comma-separated sizes, in x out."""
    return [tuple(map(int, word.split("x"))) for word in text.split(",")]


def through(x: jax.Array, weights: Sequence[jax.Array], multiply: Multiply) -> jax.Array:
    """x [T in] times one matrix after another; not in a loop, which would copy each of them."""
    return functools.reduce(multiply, weights, x)


def passes(program: Callable[..., jax.Array], x: jax.Array, weights: Sequence[jax.Array]) -> list[jax.Array]:
    """Several passes, as the threads of a machine that has paused are slow to wake."""
    return [program(x, weights) for _ in range(PASSES)]


def measure(shape: Shape, rows: int, dtype: jnp.dtype, megabytes: int, repeats: int) -> dict[str, Any]:
    """Seconds of the programs, and the bytes of weights that each reads."""
    pairs = max(1, megabytes * 2**20 // (2 * shape[0] * shape[1] * dtype.itemsize))
    weights = [jnp.full(size, 1 / size[0], dtype) for _ in range(pairs) for size in (shape, shape[::-1])]
    x, runs = jnp.ones((rows, shape[0]), dtype), {}
    for name, (multiply, options) in PROGRAMS.items():
        lowered = jax.jit(through, static_argnames="multiply").lower(x, weights, multiply)
        runs[name] = functools.partial(timed, passes, lowered.compile(compiler_options=options), x, weights)
    interleaved(runs, 1)
    seconds = {name: summary(found) for name, found in interleaved(runs, repeats).items()}
    size = PASSES * sum(w.nbytes for w in weights)
    return {"shape": shape, "rows": rows, "dtype": dtype.name, "bytes": size, "seconds": seconds}


COLUMNS = ("weights", "dtype", "rows", *(f"{name}, GB/s" for name in PROGRAMS))


def row(cell: dict[str, Any]) -> list[Any]:
    """A cell as a line of the table."""
    rates = [cell["bytes"] / cell["seconds"][name]["median"] / 1e9 for name in PROGRAMS]
    size = " x ".join(map(str, cell["shape"]))
    return [size, cell["dtype"], cell["rows"], *(f"{rate:.1f}" for rate in rates)]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=shapes, default="768x2048,2048x5632,576x1536", help="in x out")
    parser.add_argument("--rows", type=integers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--megabytes", type=int, default=256, help="of weights that one turn reads")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)

    before, results = machine(), []
    for dtype in map(float_type, args.dtypes.split(",")):
        for shape in args.shapes:
            progress(f"{shape[0]} x {shape[1]}, {dtype.name}")
            results += [measure(shape, rows, dtype, args.megabytes, args.repeats) for rows in args.rows]
    lines = [row(cell) for cell in results]
    report("products", before, [table("Products of a few rows", COLUMNS, lines)], [], results)


if __name__ == "__main__":
    main()
