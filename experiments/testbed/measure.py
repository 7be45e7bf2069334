"""Measures the shipped model: python -m experiments.testbed.measure [--model DIR].

Greedy recall by task and context length, and bits per byte of held-out source code.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvjax
from kvjax.cache.accounting import CacheBytes
from kvjax.cache.protocol import KVMethod
from kvjax.generation.model_calls import log_probs
from kvjax.models.model import Model
from kvjax.testbed import corpus, tasks

LENGTHS = (512, 1024, 2048, 4096)
SEED = 2**32  # seeds of training contexts are below


def answers(
    model: Model, method: str | KVMethod, instances: Sequence[tasks.Instance]
) -> tuple[list[list[bool]], CacheBytes]:
    """Asks all questions greedily, each after its context alone.

    Args:
      model: the model.
      method: compresses the contexts.
      instances: one batch, with equally many questions.

    Returns:
      [instance][question], whether the answer is exactly right, and the bytes of the contexts.
    """
    longest = max(len(q.prompt) + len(q.answer) for i in instances for q in i.questions)
    context = kvjax.read(model, [i.context for i in instances], method, headroom=longest)
    right: list[list[bool]] = [[] for _ in instances]
    for asked in zip(*(i.questions for i in instances), strict=True):
        new = max(len(q.answer) for q in asked)
        out = context.ask([q.prompt for q in asked], max_new_tokens=new, eos_ids=())
        for of_instance, q, tokens in zip(right, asked, out.tokens, strict=True):
            of_instance.append(q.right(tokens))
    return right, context.bytes


def recall(model: Model, task: str, length: int, instances: int) -> dict[str, float]:
    """Fraction of right answers over held-out instances, which alternate filler of code and of noise."""
    fillers = (corpus.load("held_out").window, tasks.noise)
    right = []
    for i in range(instances):
        rng = np.random.default_rng([SEED, list(tasks.TASKS).index(task), length, i])
        instance = tasks.TASKS[task](rng, length, fillers[i % 2])
        right += answers(model, kvjax.methods.full(), [instance])[0][0]
    return {"accuracy": float(np.mean(right)), "questions": len(right)}


def code_loss(model: Model, length: int, windows: int) -> dict[str, float]:
    """Bits per byte of held-out code in windows of `length`, whose first byte does not count."""
    texts = corpus.load("held_out").windows(length)
    chosen = np.linspace(0, len(texts) - 1, min(windows, len(texts))).astype(int)
    ours = []
    for i in track(chosen, "held-out code", console=Console(stderr=True), transient=True):
        logits = kvjax.logits(model, texts[i : i + 1])
        ours.append(-np.asarray(log_probs(logits[:, :-1], texts[i : i + 1, 1:])).mean() / np.log(2))
    return {"model": float(np.mean(ours)), "bytes": len(chosen) * (length - 1), "window": length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="testbed", help="a checkpoint directory (default: the shipped model)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--instances", type=int, default=16, help="contexts per task and length")
    parser.add_argument("--windows", type=int, default=96, help="windows of held-out code")
    args = parser.parse_args()
    model, found = kvjax.load(args.model), {}
    table = Table("task", *map(str, args.lengths), title="fraction of right answers (questions), full attention")
    for task in tasks.TASKS:
        found[task] = {n: recall(model, task, n, args.instances) for n in args.lengths}
        table.add_row(task, *(f"{r['accuracy']:.3f} ({r['questions']})" for r in found[task].values()))
    Console().print(table)
    code = code_loss(model, 2048, args.windows)
    print(f"held-out code: {code['model']:.3f} bits per byte, on {code['bytes']:,} bytes")
    print(json.dumps({"recall": found, "code": code}))


if __name__ == "__main__":
    main()
