"""kvjax's kernels on this machine's GPU: each against its reference, and beside what it replaces.

python -m experiments.gpu.kernels [--megabytes 256]

"fetch" reads token vectors from pinned host memory; its bits must equal those of a gather by the host. GB/s counts the
vectors alone. "attention", "scores" and "mix" read codes of groups, "tokens" codes of single tokens; their error is the
norm of the difference to float64 in NumPy over the norm of that, and its bound is what operands of the dtype allow.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import measuring
from kvjax.core import memory
from kvjax.core.attention import merge
from kvjax.core.kernels import fetch as fetch_kernel
from kvjax.core.kernels import packed_attention, products, token_attention
from kvjax.eval.run.machine import machine

ON_GPU = jax.default_backend() == "gpu"
BOUND = {"float32": 2e-3, "bfloat16": 2e-2, "float16": 5e-3}  # float32 operands may be rounded to tf32
STEPS = 32  # fetches of one timed program


def check_fetch(megabytes: int, dtype: str, K: int, W: int, n: int) -> dict[str, Any]:
    """Compares the kernel's vectors with the host's, and times both in one program of `STEPS` fetches."""
    itemsize = np.dtype(dtype).itemsize
    S = megabytes * 2**20 // (K * W * itemsize)
    rng = np.random.default_rng(0)
    values = rng.integers(0, np.iinfo(dtype).max, (1, K, S, W), dtype)
    buf = memory.pack(jnp.asarray(values), host=True)
    idx = jnp.asarray(rng.integers(0, S, (STEPS, 1, K, n), np.int32))
    ways = {"kernel": functools.partial(fetch_kernel.fetch, interpret=not ON_GPU), "host gather": fetch_kernel.gather}

    def run(way, data, idx):
        place = jax.memory.Space.Device if way == "kernel" else jax.memory.Space.Host
        where = "gpu_stream:1" if way == "kernel" else "device_host"

        def step(total, i):
            # The next indices wait for these vectors, as a decoder's next query does.
            i = (i + (total & 1).astype(jnp.int32)) % S
            x = memory._compute_on(ways[way], where)(data, jax.device_put(i, place))
            return total + x.astype(jnp.uint32).sum(dtype=jnp.uint32), x

        return jax.lax.scan(step, jnp.uint32(0), idx)

    found: dict[str, Any] = {"megabytes": megabytes, "dtype": dtype, "K": K, "W": W, "n": n}
    for way in ways:
        if way == "kernel" and not ON_GPU:  # an interpreted kernel cannot be placed on a stream
            continue
        jitted = jax.jit(functools.partial(run, way))
        total, x = jitted(buf.data, idx)
        first = np.asarray(x[0])
        expected = np.take_along_axis(values, np.asarray(idx[0])[..., None], 2)
        if not np.array_equal(first, expected):
            raise AssertionError(f"{way} returns other bits: {np.mean(first != expected):.1%} of the numbers differ")
        seconds = measuring.time_in_turns({way: functools.partial(measuring.time_run, jitted, buf.data, idx)}, 5)[way]
        found[way] = measuring.summary([s / STEPS for s in seconds])
    return found


def draw_codes(rng: np.random.Generator, bits: int, K: int, S: int, H: int, group: int, axis: str):
    """Random codes, and the numbers f64[1 K S H] that they stand for; words hold consecutive tokens."""
    per = 32 // bits
    integers = rng.integers(0, 2**bits, (1, K, S, H))
    words = np.zeros((1, K, S // per, H), np.uint32)
    for j in range(per):
        words |= integers[:, :, j::per].astype(np.uint32) << np.uint32(bits * j)
    shape = (1, K, S // group, H) if axis == "channel" else (1, K, S, H // group)
    scale, lo = rng.uniform(0.5, 1, shape) * 3 / (2**bits - 1), rng.uniform(-1.5, -0.5, shape)
    scale, lo = (np.asarray(jnp.asarray(x, jnp.bfloat16)).astype(float) for x in (scale, lo))
    numbers = integers * np.repeat(scale, group, 2 if axis == "channel" else 3)
    numbers += np.repeat(lo, group, 2 if axis == "channel" else 3)
    codes = packed_attention.PackedCodes(jnp.asarray(words), *(jnp.asarray(x, jnp.bfloat16) for x in (scale, lo)))
    return codes, numbers


def check_packed(bits: int, dtype: str, H: int, G: int, T: int, S: int = 2048, K: int = 2) -> dict[str, Any]:
    """Compares the kernels that read codes with float64 in NumPy."""
    rng = np.random.default_rng(bits)
    (k, keys), (v, values) = (
        draw_codes(rng, bits, K, S, H, 32 if H % 32 == 0 else 16, a) for a in ("channel", "token")
    )
    q = jnp.asarray(rng.normal(size=(1, K, G, T, H)), dtype)
    exact = np.asarray(q.astype(jnp.float32)).astype(float)
    logits = np.einsum("bkgth,bksh->bkgts", exact, keys) / np.sqrt(H)
    q_pos = jnp.asarray(S - T + np.arange(T)[None], jnp.int32)
    num = S - 40  # of the codes, those that are read
    visible = (np.arange(S) <= np.asarray(q_pos)[0][:, None]) & (np.arange(S) < num)
    p = np.where(visible, np.exp(logits - logits.max()), 0)
    expected = np.einsum("bkgts,bksh->bkgth", p / p.sum(-1, keepdims=True), values)
    pos = jnp.arange(S, dtype=jnp.int32)[None, None]
    options = {"bits": bits, "interpret": not ON_GPU}
    partial = jax.jit(functools.partial(packed_attention.attend, **options))(
        q, k, v, pos, q_pos, jnp.asarray([num], jnp.int32)
    )
    results = {"attention": (merge([partial]), expected)}
    if G * T <= products.MAX_QUERIES:
        results["scores"] = (jax.jit(functools.partial(products.scores, **options))(q, k), logits)
        weights = jnp.asarray(p / p.sum(-1, keepdims=True), jnp.float32)
        mixed = jax.jit(lambda w, v: products.mix(w, v, jnp.dtype(dtype), **options))(weights, v)
        results["mix"] = (mixed, expected)
    errors = {}
    for name, (found, exact_result) in results.items():
        difference = np.asarray(found, float) - exact_result
        errors[name] = float(np.linalg.norm(difference) / np.linalg.norm(exact_result))
    return {"bits": bits, "dtype": dtype, "H": H, "G": G, "T": T, "errors": errors}


def check_tokens(bits: int, dtype: str, H: int, G: int, T: int, S: int = 2000, K: int = 2) -> dict[str, Any]:
    """Compares the kernel over codes of single tokens with float64 in NumPy."""
    rng = np.random.default_rng(bits)

    def draw() -> tuple[token_attention.TokenCodes, np.ndarray]:
        data = jnp.asarray(rng.integers(0, 256, (1, K, S, H * bits // 8)), jnp.uint8)
        scale = jnp.asarray(rng.uniform(1, 3, (1, K, S)) / 2**bits, jnp.float32)
        codes = token_attention.TokenCodes(data, scale, None)
        return codes, np.asarray(token_attention.dequantize(codes, bits), float)

    (k, keys), (v, values) = draw(), draw()
    q = jnp.asarray(rng.normal(size=(1, K, G, T, H)), dtype)
    q_pos = jnp.asarray(S - T + np.arange(T)[None], jnp.int32)
    logits = np.einsum("bkgth,bksh->bkgts", np.asarray(q.astype(jnp.float32), float), keys) / np.sqrt(H)
    p = np.where(np.arange(S) <= np.asarray(q_pos)[0][:, None], np.exp(logits - logits.max()), 0)
    expected = np.einsum("bkgts,bksh->bkgth", p / p.sum(-1, keepdims=True), values)
    attend = jax.jit(functools.partial(token_attention.attend, bits=(bits, bits), interpret=not ON_GPU))
    difference = np.asarray(merge([attend(q, k, v, jnp.arange(S, dtype=jnp.int32)[None, None], q_pos)])) - expected
    error = float(np.linalg.norm(difference) / np.linalg.norm(expected))
    return {"bits": bits, "dtype": dtype, "H": H, "G": G, "T": T, "errors": {"tokens": error}}


def try_all(fun, cases: Sequence[tuple]) -> list[dict[str, Any]]:
    """Results of all cases; a case that fails has its error."""
    found = []
    for case in cases:
        try:
            found.append(fun(*case))
        except Exception as e:  # a compiler's errors have many types, and the other cases are to run
            found.append({"case": list(case), "error": f"{type(e).__name__}: {str(e).strip()[:400]}"})
        measuring.log_progress(str(found[-1])[:300])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the host buffer")
    parser.add_argument("--parts", default="fetch,packed,tokens", help="of these three")
    args = parser.parse_args(argv)
    before = machine()
    shapes = [("uint32", 8, 32, 128), ("uint32", 8, 64, 128), ("uint32", 8, 64, 1024), ("uint32", 8, 128, 128)]
    shapes += [("uint32", 8, 128, 1024), ("uint32", 1, 128, 16), ("uint8", 8, 64, 128), ("uint32", 8, 48, 100)]
    fetches = try_all(check_fetch, [(args.megabytes, *shape) for shape in shapes if "fetch" in args.parts])
    cases = [(b, d, H, G, T) for b in (1, 2, 4, 8) for d in ("bfloat16", "float32") for H, G, T in [(128, 4, 1)]]
    cases += [
        (2, "bfloat16", 64, 1, 1),
        (4, "bfloat16", 80, 8, 1),
        (2, "bfloat16", 128, 4, 5),
        (4, "float32", 16, 1, 2),
    ]
    packed = try_all(check_packed, cases if "packed" in args.parts else [])
    cases = [(b, d, 128, 4, 1) for b in (1, 2, 4, 8) for d in ("bfloat16", "float32")] + [(8, "float16", 64, 9, 2)]
    tokens = try_all(check_tokens, cases if "tokens" in args.parts else [])
    wrong = [
        r
        for r in packed + tokens
        if not all(e < BOUND[r.get("dtype", "float32")] for e in r.get("errors", {"": 9}).values())
    ]
    lines = []
    for r in fetches:
        if "error" in r:
            lines.append([*r["case"], r["error"][:60], None])
            continue
        size = r["K"] * r["n"] * r["W"] * np.dtype(r["dtype"]).itemsize
        times = [r[way]["median"] if way in r else None for way in ("kernel", "host gather")]
        lines.append([r["megabytes"], r["dtype"], r["K"], r["W"], r["n"]])
        lines[-1] += [t and f"{t * 1e6:.1f} us, {size / t / 1e9:.1f} GB/s" for t in times]
    columns = ("MB", "dtype", "heads", "width", "n", "kernel", "host gather")
    tables = [measuring.table("fetch", columns, lines)]
    rows = [
        [r["bits"], r["dtype"], r["H"], r["G"], r["T"], *(f"{e:.1e}" for e in r["errors"].values())]
        if "errors" in r
        else [*r["case"], r["error"][:60]]
        for r in packed
    ]
    columns = ("bits", "dtype", "H", "G", "T", "attention", "scores", "mix")
    tables.append(measuring.table("codes", columns, [[*r, *[None] * (len(columns) - len(r))] for r in rows]))
    rows = [
        [r["bits"], r["dtype"], r["H"], r["G"], r["T"], f"{r['errors']['tokens']:.1e}"]
        if "errors" in r
        else [*r["case"], r["error"][:60]]
        for r in tokens
    ]
    tables.append(measuring.table("codes of single tokens", ("bits", "dtype", "H", "G", "T", "attention"), rows))
    failures = [r for r in fetches if "error" in r] + wrong
    notes = [f"FAILS: {r}" for r in failures] or ["Every kernel agrees with its reference."]
    measuring.report(
        "gpu_kernels",
        before,
        tables,
        notes,
        {"fetch": fetches, "packed": packed, "tokens": tokens, "failures": failures},
    )


if __name__ == "__main__":
    main()
