"""KCache, Table 1: operations, bytes and intensity of one layer's decode attention, counted in three ways.

python -m experiments.papers.kcache.table1 [--model llama-2-7b] [--batch 8] [--context 4096] [--n 128]

"paper" evaluates the paper's formulas. "exact" reads every input once, writes every output once, and counts all
operations and grouped heads. "XLA" is the cost analysis of each part compiled alone. Only shapes matter: nothing is
allocated, and no weights are needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.bench.measuring import machine, make_parser, report, table
from experiments.bench.shapes import SHAPES
from experiments.papers import common
from experiments.papers.specache.table1 import MODELS
from kvjax import Config, KvjaxError
from kvjax.core import memory
from kvjax.core.attention import mix, scores
from kvjax.core.types import Array
from kvjax.models import checkpoint
from kvjax.utils.arguments import DTYPES, dtype_name

CONFIGS = {name.lower(): figures.config for name, figures in MODELS.items()} | SHAPES

# Formulas are text, so that the script prints the very ones that it evaluates.
# Python expressions in the paper's letters: b sequences, s tokens, d width, n heads of size h, N selected values, and 2
# bytes a number. Ours add k key/value heads and e bytes a number.
PROJECTIONS = ("6*b*d**2", "12*b*d + 6*d**2", "1 / (2/d + 1/b)")
OUTPUT = ("2*b*d**2", "4*b*d + 2*d**2", "1 / (2/d + 1/b)")
INPUTS_EXACT = ("2*b*d*(n + 2*k)*h", "e*(b*d + d*(n + 2*k)*h + b*(n + 2*k)*h)")
OUTPUT_EXACT = ("2*b*n*h*d", "e*(b*n*h + n*h*d + b*d)")
SCORES = "2*b*n*s*h + 5*b*n*s"  # scale, maximum, subtract, sum, divide; XLA does not count the exponential


@dataclasses.dataclass(frozen=True)
class Part:
    """One line of the table."""

    method: str  # "MHA" or "KCache"
    name: str
    paper: tuple[str, str, str]  # operations, bytes, intensity
    exact: tuple[str, str]  # operations, bytes
    fun: Callable[..., Any]  # the function that XLA compiles
    shapes: tuple[str, ...]  # of its arguments, axes in the letters of the formulas; "i ": integers


def project(x: Array, *kernels: Array) -> tuple[Array, ...]:
    """x [B D] times each kernel [D E]."""
    return tuple(x @ kernel for kernel in kernels)


def softmax(q: Array, k: Array) -> Array:
    """Attention weights of q [B K G 1 H] on k [B K S H]: [B K G 1 S]."""
    return jax.nn.softmax(scores(q, k), -1).astype(q.dtype)


def top_weights(q: Array, k: Array, n: int) -> tuple[Array, Array]:
    """The n largest weights of `softmax` per query head, and their indices."""
    return tuple(lax.top_k(softmax(q, k), n))


def mix_all(p: Array, v: Array) -> Array:
    """Mixes all values v [B K S H] with weights p [B K G 1 S]: [B K G 1 H]."""
    return mix(p, v).astype(v.dtype)


def mix_selected(p: Array, idx: Array, v: Array) -> Array:
    """Mixes the values at idx i32[B K G 1 n] with weights p [B K G 1 n]."""
    B, K, G, T, n = idx.shape
    # Each query head of a group chose its own values: the group's lists stand one after the other.
    values = memory.gather_tokens(memory.pack(v), idx.reshape(B, K, -1)).reshape(B, K, G, T, n, -1)
    return jnp.einsum("bkgtn,bkgtnh->bkgth", p, values)


def parts(n: int) -> list[Part]:
    """All lines in the paper's order; `n` is the number of values that KCache fetches per head."""
    x, kernels = "b d", ("d n*h", "d k*h", "d k*h")
    q, cache, all_weights, some = "b k n//k 1 h", "b k s h", "b k n//k 1 s", "b k n//k 1 N"
    first = ("Q, K, V = xWq, xWk, xWv", PROJECTIONS, INPUTS_EXACT, project, (x, *kernels))
    last = ("AWo", OUTPUT, OUTPUT_EXACT, project, ("b n*h", "n*h d"))
    paper_scores = ("2*b*s*d", "2*b*n*h + 2*b*n*h*s + 2*b*n*s", "1 / (1 + 1/h + 1/s)")
    paper_top = ("2*b*s*d", "2*b*n*h + 2*b*n*h*s + 2*b*n*N", "1 / (1 + N/(s*h) + 1/s)")
    paper_values = ("2*b*s*d", "2*b*n*s + 2*b*s*d + 2*b*d", "1 / (1 + 1/h + 1/s)")
    paper_part = ("2*b*N*d", "2*b*n*N + 2*b*N*d + 2*b*d", "1 / (1 + 1/h + 1/s)")
    scored, top = (SCORES, "e*(b*n*h + b*k*s*h + b*n*s)"), (SCORES, "e*(b*n*h + b*k*s*h + b*n*N) + 4*b*n*N")
    mixed = ("2*b*n*s*h", "e*(b*n*s + b*k*s*h + b*n*h)")
    mixed_part = ("2*b*n*N*h", "e*(b*n*N + b*n*N*h + b*n*h) + 4*b*n*N")
    return [
        Part("MHA", *first),
        Part("MHA", "S = softmax(QK'/sqrt h)", paper_scores, scored, softmax, (q, cache)),
        Part("MHA", "A = SV", paper_values, mixed, mix_all, (all_weights, cache)),
        Part("MHA", *last),
        Part("KCache", *first),
        Part("KCache", "S~ = TopN(softmax)", paper_top, top, lambda q, k: top_weights(q, k, n), (q, cache)),
        Part("KCache", "A~ = S~ Part(V)", paper_part, mixed_part, mix_selected, (some, "i " + some, cache)),
        Part("KCache", *last),
    ]


def evaluate(formula: str, sizes: Mapping[str, int]) -> float:
    """Evaluates a formula of this file."""
    return float(eval(formula, {"__builtins__": {}}, dict(sizes)))


def configuration(name: str) -> Config:
    """Configuration of a model of CONFIGS, of "testbed", or of a checkpoint directory; no weights are read."""
    if name in CONFIGS:
        return CONFIGS[name]
    where = resources.files("kvjax") / "testbed" if name == "testbed" else Path(name)
    try:
        return checkpoint.read_manifest(where).config
    except KvjaxError as e:
        raise KvjaxError(f"{e}; --model takes a checkpoint directory, testbed, {', '.join(CONFIGS)}") from e


def sizes(config: Config, batch: int, context: int, n: int, itemsize: int) -> dict[str, int]:
    """Sizes by the letters of the formulas."""
    if not 1 <= n <= context:
        raise KvjaxError(f"--n {n} must lie between 1 and --context {context}")
    a = config.kind(0).attention
    heads = {"n": a.heads, "k": a.kv_heads, "h": a.head_dim, "d": config.width}
    return {"b": batch, "s": context, "N": n, "e": itemsize, **heads}


def count_by_xla(part: Part, size: Mapping[str, int], dtype: Any) -> tuple[float, float]:
    """(operations, bytes accessed) by XLA's cost analysis of the part compiled alone."""

    def abstract(shape: str) -> jax.ShapeDtypeStruct:
        kind = jnp.int32 if shape.startswith("i ") else dtype
        return jax.ShapeDtypeStruct([int(evaluate(w, size)) for w in shape.removeprefix("i ").split()], kind)

    # Each part is compiled alone: in one program XLA would fuse them, and nothing could tell their counts apart.
    cost = jax.jit(part.fun).lower(*map(abstract, part.shapes)).compile().cost_analysis()
    return cost.get("flops", 0.0), cost.get("bytes accessed", 0.0)


def records(config: Config, batch: int, context: int, n: int, dtype: str) -> list[dict[str, Any]]:
    """One per part: operations, bytes and intensity (operations per byte) of each count."""
    itemsize, found = jnp.dtype(dtype).itemsize, []
    size = sizes(config, batch, context, n, itemsize)
    for part in parts(n):
        flops, bytes_, printed = (evaluate(f, size) for f in part.paper)
        counts = {
            "paper": (flops, bytes_ * itemsize / 2),  # its formulas count 2 bytes a number
            "exact": tuple(evaluate(f, size) for f in part.exact),
            "xla": count_by_xla(part, size, jnp.dtype(dtype)),
        }
        record = {"method": part.method, "part": part.name, "formulas": part.paper, "printed_intensity": printed}
        for source, (operations, moved) in counts.items():
            record[source] = {"flops": operations, "bytes": moved, "intensity": operations / moved if moved else 0.0}
        found.append(record)
    return found


def row(r: Mapping[str, Any]) -> list[Any]:
    """Formats a record."""
    counts = [r[source] for source in ("paper", "exact", "xla")]
    flops, moved = ([f"{x[k] / 1e6:,.2f}" for x in counts] for k in ("flops", "bytes"))
    intensity = [f"{r['printed_intensity']:.3f}", *(f"{x['intensity']:.3f}" for x in counts)]
    return [r["method"], r["part"], *flops, *moved, *intensity]


COLUMNS = ("", "part", "MFLOP: paper", "exact", "XLA", "MB: paper", "exact ", "XLA ")
COLUMNS += ("FLOP/B: printed", "paper", "exact  ", "XLA  ")
NOTES = (
    "Printed: the paper's own formula of the intensity; paper: its operations over its bytes. They differ in one "
    "line: A~ moves 2bnN + 2bNd + 2bd bytes, so its intensity is 1/(1 + 1/h + 1/N); the paper prints the 1/s of the "
    "line A = SV. (The paper as plain text has '2bnh+2bnhs+2bns2' and the like: that last 2 begins a second "
    "rendering of the formula.)",
    "Paper and exact: the paper reads x three times for Q, K, V, leaves out the softmax's own operations and KCache's "
    "indices, and has d = nh and no grouped heads. With grouped heads keys and values are read once per group, but "
    "KCache takes N values per query head: n/k times N per key/value head.",
    "XLA: arrays that its programs write and read again between their loops count too, most of all scores. It "
    "charges a gather for its whole operand, so the bytes of A~ contain all of V, which the program does not read. "
    "It does not count exponentials and the top N as operations. The paper's 2 bytes a number are scaled "
    "to {}; on a CPU 16-bit programs count their conversions to float32.",
)


def main(argv: Sequence[str] | None = None) -> None:
    p = make_parser(__doc__)
    p.add_argument("--model", default="llama-2-7b", help="a checkpoint directory, testbed, " + ", ".join(CONFIGS))
    p.add_argument("--batch", type=int, default=8, help="sequences, b")
    p.add_argument("--context", type=int, default=4096, help="tokens of the context, s")
    p.add_argument("--n", type=int, default=128, help="values that KCache fetches per head, N")
    p.add_argument("--dtype", type=dtype_name, choices=DTYPES, default="float32", help="of the compiled parts")
    args = p.parse_args(argv)
    before, config = machine(), configuration(args.model)
    found = records(config, args.batch, args.context, args.n, args.dtype)
    formulas = [
        (r["method"], r["part"], *(f.replace("**2", "²").replace("*", "") for f in r["formulas"])) for r in found
    ]
    title = f"KCache, Table 1: {args.model}, one layer, b={args.batch}, s={args.context}, N={args.n}, {args.dtype}"
    tables = [
        table("KCache, Table 1, as printed", ("", "part", "FLOPs", "I/O, bytes", "FLOP/byte"), formulas),
        table(title, COLUMNS, [row(r) for r in found]),
    ]
    notes = [*NOTES[:-1], NOTES[-1].format(args.dtype)]
    about = {"model": args.model, "batch": args.batch, "context": args.context, "n": args.n, "dtype": args.dtype}
    report("kcache_table1", before, tables, notes, {**about, "parts": found})


KEYS = {"QKV": ("MHA", "Q,"), "S": ("MHA", "S "), "A": ("MHA", "A "), "A~": ("KCache", "A~")}


def describe(results: Mapping[str, Any]) -> str:
    """The intensity of four parts, exactly and by XLA's count."""
    by = {(r["method"], r["part"][:2]): r for r in results["parts"]}
    found = (f"{name} {by[x]['exact']['intensity']:.2f}, {by[x]['xla']['intensity']:.2f}" for name, x in KEYS.items())
    return f"FLOP per byte in {results['dtype']}, exact and by XLA: {'; '.join(found)}"


in_brief = common.brief(
    describe,
    "the same formulas, in 16 bits",
    "XLA counts the same operations and more bytes: scores between its loops, and in A~ all of V, since it charges a "
    "gather for its whole operand. Numbers of 4 bytes halve an intensity.",
)

if __name__ == "__main__":
    common.run_script(main)
