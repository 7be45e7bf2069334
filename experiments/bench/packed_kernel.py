"""Decode attention over packed keys and values against the same attention in bfloat16, in one run.

python -m experiments.bench.packed_kernel [--bits 2] [--context 32768] [--batches 1,8]

Sides: "kernel", `packed_attention.attend` (on a GPU only); "dequantized", its reference, which unpacks everything;
"dense", kvjax's attention over the same numbers in bfloat16; "jax cudnn" and "jax xla",
`jax.nn.dot_product_attention` on them, where it supports the shapes. The run stops if two sides disagree. A turn runs
several times over enough layers to exceed the caches; seconds are per layer. GB/s counts the bytes that a side must
read; "of bandwidth" is their rate over the bandwidth measured in the same turns. The target is a kernel at least 3
times as fast as "dense" on a GPU. Without a GPU the sizes are small, there is no kernel, and the figures say little.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import measuring
from kvjax.core.attention import attend_dense, merge
from kvjax.core.kernels import packed_attention
from kvjax.core.types import KVBlock
from kvjax.eval.run.machine import machine

K, G, H, GROUP = 8, 4, 128, 64  # key/value heads, query heads of each, channels, numbers that share a scale
SIZES = {  # defaults, by whether there is a GPU
    True: {"context": 32_768, "batches": [1, 8], "megabytes": 256, "rounds": 8, "repeats": 9, "read_megabytes": 4096},
    False: {"context": 1024, "batches": [1, 2], "megabytes": 1, "rounds": 1, "repeats": 5, "read_megabytes": 64},
}
TOLERANCE = 0.05  # norm of the difference to the reference over the reference's: codes are exact, bfloat16 is not

Layer = dict[str, Any]  # the same numbers in the form that each side takes


@functools.partial(jax.jit, static_argnames=("B", "S", "bits"))
def random_layer(key: jax.Array, B: int, S: int, bits: int) -> Layer:
    """Random codes of numbers between about -1 and 1, and these numbers in bfloat16."""
    keys = iter(jax.random.split(key, 6))

    def codes(*scales: int) -> packed_attention.PackedCodes:
        words = jax.random.bits(next(keys), (B, K, S * bits // 32, H), jnp.uint32)
        scale = jax.random.uniform(next(keys), (B, K, *scales), minval=0.5) * 2 / (2**bits - 1)
        minimum = -jax.random.uniform(next(keys), (B, K, *scales), minval=0.5)
        return packed_attention.PackedCodes(words, scale.astype(jnp.bfloat16), minimum.astype(jnp.bfloat16))

    # KIVI's groups: keys per channel along tokens, values per token along channels.
    k, v = codes(S // GROUP, H), codes(S, H // GROUP)
    numbers = packed_attention.dequantize_keys(k, bits), packed_attention.dequantize_values(v, bits)
    dense = [x.astype(jnp.bfloat16) for x in numbers]
    pos = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, 1, S))
    return {"packed": (k, v, pos), "dense": KVBlock(*dense, pos), "jax": tuple(x.swapaxes(1, 2) for x in dense)}


def sides(bits: int, S: int, gpu: bool) -> dict[str, tuple[str, Callable]]:
    """Name -> (the side's key in a Layer, its function of q [B K G 1 H] and of that entry)."""

    def over_codes(attend, q, codes):
        at = jnp.full((q.shape[0],), S, jnp.int32)
        return merge([attend(q, *codes, at[:, None], at, bits=bits)])

    def dense(q, block):
        return merge([attend_dense(q, block, jnp.full((q.shape[0], 1), S, jnp.int32))])

    # JAX's layout is [B T N H]; `random_layer` transposes keys and values, so that the timed call does not.
    def theirs(implementation, q, kv):
        query = q.reshape(q.shape[0], 1, K * G, H)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # tests are stricter than JAX
            return jax.nn.dot_product_attention(query, *kv, implementation=implementation).reshape(q.shape)

    kernel = {"kernel": ("packed", functools.partial(over_codes, packed_attention.attend))}
    cudnn = {"jax cudnn": ("jax", functools.partial(theirs, "cudnn"))}
    return {
        **(kernel if gpu else {}),
        "dequantized": ("packed", functools.partial(over_codes, packed_attention.attend_reference)),
        "dense": ("dense", dense),
        **(cudnn if gpu else {}),
        "jax xla": ("jax", functools.partial(theirs, "xla")),
    }


def compile_turn(attend: Callable, num_rounds: int) -> Callable:
    """Jits `num_rounds` passes over all layers; each output changes the next query, as in a decoder."""

    def run(q, layers):
        def run_layers(_, q):
            for x in layers:
                # Without this dependence XLA could compute equal rounds once.
                q = q + 0.01 * attend(q, x).astype(q.dtype)
            return q

        # One dispatch a turn: a single layer takes about as long as the launch of a program.
        return jax.lax.fori_loop(0, num_rounds, run_layers, q)

    return jax.jit(run)


def relative_errors(
    runs: dict[str, tuple[str, Callable]], q: jax.Array, x: Layer
) -> tuple[dict[str, float], list[str]]:
    """Norm of each side's difference to the reference over the reference's norm.

    Returns:
      the errors by name, and a note for each of JAX's implementations that does not support these shapes.

    Raises:
      AssertionError: if an error reaches TOLERANCE.
    """
    expected = jax.jit(runs["dequantized"][1])(q, x["packed"])
    errors, left_out = {}, []
    for name, (takes, attend) in runs.items():
        try:
            out = jax.jit(attend)(q, x[takes]).astype(jnp.float32)
        except Exception as e:  # JAX raises many types for a shape that it does not support
            if not name.startswith("jax"):
                raise
            left_out.append(f"{name} is left out: {str(e).strip().splitlines()[0]}")
            continue
        errors[name] = float(jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected))
        if not errors[name] < TOLERANCE:
            raise AssertionError(f"{name} differs from the reference by {errors[name]:.1%} of its norm")
    return errors, left_out


def measure(bits: int, S: int, B: int, size: dict[str, Any], probes, gpu: bool) -> tuple[dict[str, Any], list[str]]:
    """Seconds per layer of each side for one batch size, and notes on the sides that are left out."""

    def num_bytes(x):
        return sum(a.nbytes for a in jax.tree.leaves(x))

    layers = [random_layer(jax.random.key(0), B, S, bits)]
    count = max(1, -(-(size["megabytes"] * 2**20) // num_bytes(layers[0]["packed"])))
    layers += [random_layer(jax.random.key(i), B, S, bits) for i in range(1, count)]
    q = jax.random.normal(jax.random.key(count), (B, K, G, 1, H), jnp.bfloat16)
    all_sides = sides(bits, S, gpu)
    errors, left_out = relative_errors(all_sides, q, layers[0])

    runs = {}
    for name in errors:
        takes, attend = all_sides[name]
        args = compile_turn(attend, size["rounds"]), q, [x[takes] for x in layers]
        measuring.time_run(*args)
        runs[name] = lambda args=args: measuring.time_run(*args) / (count * size["rounds"])
    read, reads = probes
    seconds = measuring.time_in_turns({**runs, **reads}, size["repeats"])
    need = {name: num_bytes(layers[0][all_sides[name][0]]) for name in runs}
    cell = {
        "batch": B,
        "layers": count,
        "seconds_per_layer": {name: measuring.summary(seconds[name]) for name in runs},
        "bytes": need,
        "bandwidth": read / min(min(seconds[name]) for name in reads),
        "error": errors,
    }
    return cell, left_out


COLUMNS = ("batch", "side", "MB/layer", "us/layer", "best", "GB/s", "of bandwidth", "vs dense", "error")


def rows(cell: dict[str, Any]) -> list[list[str]]:
    """Formats a cell, one row per side."""
    lines, dense = [], cell["seconds_per_layer"]["dense"]["median"]
    for name, s in cell["seconds_per_layer"].items():
        rate, t = cell["bytes"][name] / s["median"], s["median"]
        times = (f"{t * 1e6:.1f}", f"{s['best'] * 1e6:.1f}", f"{rate / 1e9:.1f}", f"{rate / cell['bandwidth']:.0%}")
        size, error = f"{cell['bytes'][name] / 1e6:.1f}", f"{cell['error'][name]:.2%}"
        lines.append([cell["batch"], name, size, *times, f"{dense / t:.2f}x", error])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    gpu = jax.default_backend() == "gpu"
    default = SIZES[gpu]
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--bits", type=int, default=2, choices=(1, 2, 4, 8))
    parser.add_argument("--context", type=int, default=default["context"], help=f"tokens, a multiple of {GROUP}")
    parser.add_argument("--batches", type=measuring.parse_integers, default=default["batches"])
    parser.add_argument("--megabytes", type=int, default=default["megabytes"], help="of codes, in all layers")
    parser.add_argument("--rounds", type=int, default=default["rounds"], help="times over all layers in a turn")
    parser.add_argument("--repeats", type=int, default=default["repeats"], help="turns; the table shows their median")
    parser.add_argument("--read-megabytes", type=int, default=default["read_megabytes"], help="of the bandwidth probe")
    args = parser.parse_args(argv)
    if args.context % GROUP:
        parser.error(f"--context must be a multiple of {GROUP}, got {args.context}")

    before, cells, notes = machine(), [], {}
    probes = measuring.read_probes(args.read_megabytes)
    for batch in args.batches:
        measuring.log_progress(f"batch {batch}")
        cell, left_out = measure(args.bits, args.context, batch, vars(args), probes, gpu)
        cells.append({"bits": args.bits, "context": args.context, **cell})
        notes |= dict.fromkeys(left_out)
        jax.clear_caches()
    if not gpu:
        notes["The kernel needs a GPU."] = None
    title = f"{args.bits}-bit decode attention, {args.context:,} tokens, {K} key/value heads x {G} of {H}"
    lines = [line for cell in cells for line in rows(cell)]
    bandwidth = ", ".join(f"{cell['bandwidth'] / 1e9:.1f}" for cell in cells)
    table = measuring.table(title, COLUMNS, lines)
    measuring.report("packed_kernel", before, [table], [f"Bandwidth, GB/s: {bandwidth}", *notes], cells)


if __name__ == "__main__":
    main()
