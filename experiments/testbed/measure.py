"""What the shipped model can do: python -m experiments.testbed.measure [--model DIR].

Greedy recall by task and context length, and held-out source code in bits per byte beside a 5-gram model's.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvjax
from experiments.testbed import ngram
from kvjax.eval.run import harness
from kvjax.models.model import Model
from kvjax.run.calls import log_probs
from kvjax.testbed import corpus, tasks

LENGTHS = (512, 1024, 2048, 4096)
SEED = 2**32  # training seeds are below


def recall(model: Model, task: str, length: int, instances: int) -> dict[str, float]:
    """Share of questions answered exactly, over held-out instances in filler of code and of noise in turn."""
    fillers = (lambda rng, n: corpus.load("held_out").window(rng, n), tasks.noise)
    right = []
    for i in range(instances):
        rng = np.random.default_rng([SEED, list(tasks.TASKS).index(task), length, i])
        instance = tasks.TASKS[task](rng, length, fillers[i % 2])
        right += harness.answers(model, kvjax.methods.full(), [instance])[0][0]
    return {"accuracy": float(np.mean(right)), "questions": len(right)}


def code_loss(model: Model, length: int, windows: int) -> dict[str, float]:
    """Bits per byte of held-out code: the model on windows of `length`, and the 5-gram model on the same bytes."""
    held_out = corpus.load("held_out")
    rows = held_out.windows(length)
    chosen = np.linspace(0, len(rows) - 1, min(windows, len(rows))).astype(int)
    baseline = ngram.bits(held_out.tokens)[: rows.size].reshape(rows.shape)[chosen, 1:]
    ours = []
    for i in track(chosen, "held-out code", console=Console(stderr=True), transient=True):
        logits = kvjax.logits(model, rows[i : i + 1])
        ours.append(-np.asarray(log_probs(logits[:, :-1], rows[i : i + 1, 1:])).mean() / np.log(2))
    result = {"model": float(np.mean(ours)), "5-gram": float(baseline.mean()), "bytes": int(baseline.size)}
    return result | {"train_bytes": len(corpus.load("train").tokens), "window": length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="testbed", help="a checkpoint directory (default: the shipped model)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--instances", type=int, default=16, help="contexts per task and length")
    parser.add_argument("--windows", type=int, default=96, help="windows of held-out code")
    args = parser.parse_args()
    model, found = kvjax.load(args.model), {}
    table = Table("task", *map(str, args.lengths), title="share of answers right (questions), full attention")
    for task in tasks.TASKS:
        found[task] = {n: recall(model, task, n, args.instances) for n in args.lengths}
        table.add_row(task, *(f"{r['accuracy']:.3f} ({r['questions']})" for r in found[task].values()))
    Console().print(table)
    code = code_loss(model, 2048, args.windows)
    print(f"held-out code: {code['model']:.3f} bits per byte, 5-gram {code['5-gram']:.3f}, on {code['bytes']:,} bytes")
    print(json.dumps({"recall": found, "code": code}))


if __name__ == "__main__":
    main()
