"""Time of a decode step on a GPU: kernels by name, and how much of each fetch other kernels hide.

python -m experiments.gpu.overlap [--model 1b] [--context 32768] [--methods "full; kcache:n=128"]

Each method's loop runs under JAX's profiler. "busy" is the time in which at least one kernel or copy runs; "fetch" is
the time of the kernel that reads host memory, and "hidden" the part of it during which another kernel runs.
KVJAX_GPU_KERNELS=0 in the environment shows the same with the host's gather instead.
"""

from __future__ import annotations

import collections
import glob
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from experiments.bench import measuring
from experiments.bench.decoders import random_loop
from experiments.gpu.models import SHAPES, fill_model
from kvjax.eval.run.machine import machine

METHODS = "full; kcache:n=128,device_layers=0; specache:bits=2,group=64,residual=128"
STEPS = 8
ROOM = 96  # as in `decode` by default, so that its compiled programs serve here, too
FETCH = ("fetch_rows", "memcpy")  # in the names of what reads the host

Span = tuple[float, float]  # start and end, in nanoseconds


def unite(spans: Sequence[Span]) -> list[Span]:
    """The union of spans, as spans that do not touch."""
    united: list[Span] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((start, end))
    return united


def length(spans: Sequence[Span]) -> float:
    """The total length of spans that do not overlap."""
    return sum(end - start for start, end in spans)


def intersect(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """The parts that two unions share."""
    return [(max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b if max(x[0], y[0]) < min(x[1], y[1])]


def read_events(folder: str) -> list[tuple[str, str, float, float]]:
    """(stream, name, start, end) of each kernel and copy on the GPU."""
    (path,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
    events = []
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        if "/device:GPU" not in plane.name:
            continue
        for line in plane.lines:
            # Lines of modules, steps and scopes repeat what the streams have.
            if line.name.startswith("Stream"):
                events += [(line.name, e.name, e.start_ns, e.start_ns + e.duration_ns) for e in line.events]
    return events


def summarize(events: Sequence[tuple[str, str, float, float]]) -> dict[str, Any]:
    """Milliseconds per step by stream and by kernel, and how much of the fetches is hidden."""
    if not events:
        return {"note": "the profile has no events of a GPU"}
    per_step = 1e-6 / STEPS
    fetches = unite([(s, e) for _, name, s, e in events if any(word in name.lower() for word in FETCH)])
    others = unite([(s, e) for _, name, s, e in events if not any(word in name.lower() for word in FETCH)])
    by_name: dict[str, float] = collections.defaultdict(float)
    counts: dict[str, int] = collections.Counter()
    by_stream: dict[str, float] = collections.defaultdict(float)
    for stream, name, s, e in events:
        by_name[name] += (e - s) * per_step
        counts[name] += 1
        by_stream[stream] += (e - s) * per_step
    span = max(e for *_, e in events) - min(s for *_, s, _ in events)
    top = sorted(by_name, key=lambda name: -by_name[name])[:15]
    return {
        "span": span * per_step,
        "busy": length(unite([(s, e) for _, _, s, e in events])) * per_step,
        "launches": len(events) / STEPS,
        "fetch": length(fetches) * per_step,
        "hidden": length(intersect(fetches, others)) * per_step,
        "streams": dict(by_stream),
        "kernels": {name: {"ms": by_name[name], "count": counts[name] / STEPS} for name in top},
    }


def profile(model: kvjax.Model, method: str, batch: int, context: int) -> dict[str, Any]:
    """Profiles `STEPS` decode steps of a compiled loop."""
    loop = random_loop(model, method, batch, context, ROOM)
    loop.decode(STEPS)
    loop.decode(STEPS)
    seconds = loop.decode(STEPS) / STEPS
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            loop.decode(STEPS)
        found = summarize(read_events(folder))
    return {"method": method, "batch": batch, "ms": seconds * 1e3, **found}


def main(argv: Sequence[str] | None = None) -> None:
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="1b")
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--methods", default=METHODS, help='separated by ";"')
    args = parser.parse_args(argv)
    before, model, results = machine(), fill_model(SHAPES[args.model], jnp.bfloat16), []
    for method in args.methods.split(";"):
        measuring.log_progress(method.strip())
        try:
            results.append(profile(model, method.strip(), args.batch, args.context))
        except Exception as e:  # a method that fails must not hide the others
            results.append({"method": method.strip(), "note": f"{type(e).__name__}: {str(e)[:300]}"})
        measuring.log_progress(str(results[-1])[:1500])
        jax.clear_caches()
    columns = ("method", "ms/step", "span", "busy", "launches", "fetch", "hidden", "note")
    keys = ("ms", "span", "busy", "launches", "fetch", "hidden")
    lines = [[r["method"], *(f"{r[k]:.3f}" if k in r else None for k in keys), r.get("note", "")[:60]] for r in results]
    title = f"Profile of {args.model}, {args.context:,} tokens, batch {args.batch}, ms per step"
    measuring.report("gpu_overlap", before, [measuring.table(title, columns, lines)], [], results)


if __name__ == "__main__":
    main()
