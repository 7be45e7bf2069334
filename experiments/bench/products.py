"""Bytes of weights per second in matrix products of few rows: as XLA multiplies on a CPU, without packing, in parts.

python -m experiments.bench.products [--shapes 768x2048,576x1536] [--rows 1,2,4,8,16,32,64] [--dtypes float32,bfloat16]

A program multiplies x [rows in] by a matrix [in out], the product by one [out in], and so on with new matrices, whose
total exceeds the caches, as in a decode step. The programs take turns. The last program is `kvjax.core.matmul.matmul`,
which splits the product of one row with a large matrix. A whole decode step also has products that do not wait for each
other; experiments/LOG.md has figures of whole models too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import measuring
from kvjax.core.matmul import NO_PACKING, matmul
from kvjax.eval.run.machine import machine
from kvjax.utils.arguments import float_type

PASSES = 8  # per turn: threads of a machine that has paused are slow to wake
Shape = tuple[int, int]
Multiply = Callable[[jax.Array, jax.Array], jax.Array]
PROGRAMS = {"packed": (jnp.matmul, None), "not packed": (jnp.matmul, NO_PACKING), "kvjax": (matmul, None)}
"""Name -> (the product, options of the compiler)."""


def multiply_all(x: jax.Array, weights: Sequence[jax.Array], multiply: Multiply) -> jax.Array:
    """x [T in] times one matrix after another; unrolled, since a compiled loop would copy each of them."""
    return functools.reduce(multiply, weights, x)


def measure(shape: Shape, rows: int, dtype: jnp.dtype, megabytes: int, repeats: int) -> dict[str, Any]:
    """Seconds of each program, and the bytes of weights that each reads."""

    def run_passes(program: Callable[..., jax.Array]) -> list[jax.Array]:
        return [program(x, weights) for _ in range(PASSES)]

    pairs = max(1, megabytes * 2**20 // (2 * shape[0] * shape[1] * dtype.itemsize))
    # All results are 1: random weights would soon leave the normal numbers, and a CPU multiplies others slowly.
    weights = [jnp.full(size, 1 / size[0], dtype) for _ in range(pairs) for size in (shape, shape[::-1])]
    x, runs = jnp.ones((rows, shape[0]), dtype), {}
    for name, (multiply, options) in PROGRAMS.items():
        lowered = jax.jit(multiply_all, static_argnames="multiply").lower(x, weights, multiply)
        runs[name] = functools.partial(measuring.time_run, run_passes, lowered.compile(compiler_options=options))
    measuring.time_in_turns(runs, 1)
    seconds = {name: measuring.summary(found) for name, found in measuring.time_in_turns(runs, repeats).items()}
    size = PASSES * sum(w.nbytes for w in weights)
    return {"shape": shape, "rows": rows, "dtype": dtype.name, "bytes": size, "seconds": seconds}


COLUMNS = ("weights", "dtype", "rows", *(f"{name}, GB/s" for name in PROGRAMS))


def row(cell: dict[str, Any]) -> list[Any]:
    """Formats a cell."""
    rates = [cell["bytes"] / cell["seconds"][name]["median"] / 1e9 for name in PROGRAMS]
    size = " x ".join(map(str, cell["shape"]))
    return [size, cell["dtype"], cell["rows"], *(f"{rate:.1f}" for rate in rates)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--shapes", default="768x2048,2048x5632,576x1536", help="in x out")
    parser.add_argument("--rows", type=measuring.parse_integers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--megabytes", type=int, default=256, help="of weights, in one pass")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)

    before, results = machine(), []
    for dtype in map(float_type, args.dtypes.split(",")):
        for shape in (tuple(map(int, size.split("x"))) for size in args.shapes.split(",")):
            measuring.log_progress(f"{shape[0]} x {shape[1]}, {dtype.name}")
            results += [measure(shape, rows, dtype, args.megabytes, args.repeats) for rows in args.rows]
    lines = [row(cell) for cell in results]
    measuring.report("products", before, [measuring.table("Products of a few rows", COLUMNS, lines)], [], results)


if __name__ == "__main__":
    main()
