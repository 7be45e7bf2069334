"""SpeCache, Table 3: the largest batch of Mistral-7B that fits a device, and its decode throughput.

python -m experiments.papers.specache.table3 [--memory-gb 48] [--measure small] [--batch 4] [--contexts 2048,8192,32768]

The batch follows from bytes alone: weights, caches by shape evaluation, and the arrays of a step. Throughput is
measured on a GPU, or for a model of `experiments/bench/shapes.py` named by --measure, with random weights and caches.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench.decoders import random_loop
from experiments.bench.measuring import log_progress, machine, make_parser, parse_integers, report, summary, table
from experiments.bench.shapes import SHAPES
from experiments.papers import common
from experiments.papers.specache.table1 import MODELS
from kvjax import Config, KvjaxError, Method
from kvjax.engine.plan import bind
from kvjax.models.checkpoint import parameter_shapes

GIB = 2**30
CONFIG = MODELS["Mistral-7B"].config
METHODS = ("full", "specache:bits=2,group={group}", "specache:bits=1,group={group}")
# (batch, tokens per second) by context, in the order of METHODS, on one A6000 of 48 GB.
PAPER = {
    2048: ((44, 190.3), (272, 418.5), (410, 526.3)),
    8192: ((11, 47.0), (82, 133.7), (134, 177.7)),
    32768: ((3, 10.3), (22, 34.6), (36, 47.3)),
}


def weight_bytes(config: Config, itemsize: int = 2) -> int:
    """Bytes of all parameters, in 16 bits by default."""
    return itemsize * sum(int(np.prod(shape)) for shape in parameter_shapes(config).values())


def step_bytes(config: Config, method: Method, context: int) -> int:
    """Bytes of one sequence in a decode step without its cache: one layer's scores and weights, activations, logits."""
    tokens = 1 + max(layer.needs.draft_tokens for layer in bind(method, config))  # SpeCache runs a predicted one, too
    scores = 2 * 4 * config.kind(0).attention.heads * context  # float32 logits and weights, of one layer at a time
    activations = 2 * (4 * config.width + 2 * config.kind(0).mlp.width)
    return tokens * (scores + activations + 4 * config.vocab_size)


def plan(config: Config, method: Method, context: int, memory_bytes: int, workspace: int) -> dict[str, Any]:
    """The largest batch that fits, and the bytes that it follows from."""
    planned = kvjax.planned_bytes(method, config, context, dtype="bfloat16").held
    step, weights = step_bytes(config, method, context), weight_bytes(config)
    batch = max((memory_bytes - weights - workspace) // (planned["device"] + step), 0)
    sizes = {"weights": weights, "workspace": workspace, "row": planned["device"], "row_step": step}
    return {"batch": batch, "bytes": {**sizes, "host": batch * planned["pinned_host"]}}


def throughput(model: kvjax.Model, method: Method, batch: int, context: int, steps: int, repeats: int) -> float:
    """Median tokens per second of the whole batch, after a warm-up."""
    loop = random_loop(model, method, batch, context, steps * (repeats + 1))
    loop.decode(steps)
    # Methods take no turns here: at the largest batch only one cache fits the device.
    return batch * steps / summary([loop.decode(steps) for _ in range(repeats)])["median"]


def load_measured_model(name: str | None) -> tuple[str, kvjax.Model] | None:
    """The random model to time: by default Mistral-7B in bfloat16 on a GPU, and none elsewhere."""
    on_gpu = jax.devices()[0].platform == "gpu"
    if name is None and not on_gpu:
        return None
    if name in (None, "mistral-7b"):
        return "mistral-7b", kvjax.random_model(CONFIG, dtype=jnp.bfloat16)
    if name not in SHAPES:
        raise KvjaxError(f"unknown model {name!r}; --measure takes mistral-7b, {', '.join(SHAPES)}")
    return name, kvjax.random_model(SHAPES[name])


def measure(args: argparse.Namespace, records: list[dict[str, Any]]) -> str:
    """Adds measured tokens per second to the records; returns a note on the model and the batch."""
    chosen = load_measured_model(args.measure)
    if chosen is None:
        return "Throughput: not measured, there is no GPU; --measure small times a small random model on this machine."
    name, model = chosen
    a = model.config.kind(0).attention
    group = args.group if a.head_dim % args.group == 0 else a.head_dim
    for r in records:
        text = METHODS[r["column"]].format(group=group)
        batch = args.batch or (r["batch"] if name == "mistral-7b" else 4)
        log_progress(f"{name}, {text}, {r['context']} tokens, batch {batch}")
        speed = throughput(model, kvjax.parse(text), batch, r["context"], args.steps, args.repeats)
        r["measured"] = {"model": name, "method": text, "batch": batch, "tokens_per_second": speed}
        jax.clear_caches()
    return (
        f"Throughput: of {name} with random weights, groups of {group}, one method after the other, batch in brackets; "
        + ("the paper's is on an A6000." if name == "mistral-7b" else "the paper's is of Mistral-7B on an A6000.")
    )


COLUMNS = ("tokens", "method", "MiB/sequence", "+ step", "batch", "/ full", "host GiB", "paper", "/ full ")
COLUMNS += ("tok/s", "paper ")
NOTE = (
    "Differs from the paper: its batches were found by trial in transformers, whose cache is copied as it grows; ours "
    "follow from bytes, with no copy, so they are larger, most of all for `full`. Host memory is no limit here: "
    "its column has the bytes that the batch would need there."
)


def row(r: Mapping[str, Any], full: Mapping[str, Any]) -> list[Any]:
    """Formats a record; `full` is the record of the full cache at the same context."""
    nothing = [(None, None)] * len(METHODS)  # for a context that is not the paper's
    of_context = PAPER.get(r["context"], nothing)
    (paper_batch, paper_speed), (paper_full_batch, _) = of_context[r["column"]], of_context[0]
    sizes, measured = r["bytes"], r.get("measured")

    def times(x: float | None, y: float | None) -> str | None:
        return f"{x / y:.1f}x" if x and y else None

    memory = [f"{sizes['row'] / 2**20:,.1f}", f"{sizes['row_step'] / 2**20:,.1f}"]
    batches = [r["batch"], times(r["batch"], full["batch"]), f"{sizes['host'] / GIB:,.0f}"]
    paper_batches = [paper_batch, times(paper_batch, paper_full_batch)]
    speed = f"{measured['tokens_per_second']:.1f} ({measured['batch']})" if measured else None
    return [f"{r['context']:,}", r["method"], *memory, *batches, *paper_batches, speed, paper_speed]


def main(argv: Sequence[str] | None = None) -> None:
    p = make_parser(__doc__)
    p.add_argument("--memory-gb", type=float, default=48, help="of the device, in GiB (default: the paper's A6000)")
    p.add_argument("--workspace-gb", type=float, default=1, help="set aside for programs and fragments, in GiB")
    p.add_argument("--contexts", type=parse_integers, default=list(PAPER))
    p.add_argument("--group", type=int, default=64)
    p.add_argument("--measure", help="mistral-7b (default on a GPU), " + ", ".join(SHAPES))
    p.add_argument("--batch", type=int, default=0, help="sequences that are timed (default: the planned batch, or 4)")
    p.add_argument("--steps", type=int, default=8, help="tokens per turn")
    p.add_argument("--repeats", type=int, default=5, help="turns; the median counts")
    args = p.parse_args(argv)
    before, records = machine(), []
    for context in args.contexts:
        for column, text in enumerate(t.format(group=args.group) for t in METHODS):
            sizes = (int(args.memory_gb * GIB), int(args.workspace_gb * GIB))
            found = plan(CONFIG, kvjax.parse(text), context, *sizes)
            records.append({"context": context, "method": text, "column": column, **found})
    note = measure(args, records)
    lines = [row(r, records[i - r["column"]]) for i, r in enumerate(records)]
    title = f"SpeCache, Table 3: Mistral-7B in bfloat16 on {args.memory_gb:g} GiB"
    weights = (
        f"Batch: ({args.memory_gb:g} GiB - {weight_bytes(CONFIG) / GIB:.1f} of weights - {args.workspace_gb:g} aside) "
        "/ (cache + step of a sequence); step: one layer's scores and weights, activations, logits."
    )
    report("specache_table3", before, [table(title, COLUMNS, lines)], [weights, note, NOTE], records)


def describe_gains(batches: Mapping[int, Sequence[int]]) -> str:
    """Batches at 2 and 1 bit over those of `full`, by tokens of the context."""
    gains = {c: [f"{x / max(full, 1):.1f}x" for x in low_bits] for c, (full, *low_bits) in batches.items()}
    return "; ".join(f"{c:,} tokens {', '.join(gain)}" for c, gain in gains.items())


def describe(results: Sequence[Mapping[str, Any]]) -> str:
    """Our batches over those of `full`."""
    by = {(r["context"], r["column"]): r["batch"] for r in results}
    batches = {c: [by[c, i] for i in range(3)] for c in PAPER if (c, 0) in by}
    return f"batch at 2 and 1 bit over full: {describe_gains(batches)}"


in_brief = common.brief(
    describe,
    describe_gains({c: [batch for batch, _ in cells] for c, cells in PAPER.items()}),
    "Ours follows from bytes alone; the paper's baseline copies its cache as it grows, so its full batches are "
    "smaller and its gains larger.",
)

if __name__ == "__main__":
    common.run_script(main)
