"""What the scripts share: arguments, the quality of methods on one model, tables, plots, errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvjax
from experiments.bench.ours import Ours
from kvjax import KvjaxError, Model, State, api, memory
from kvjax.eval import corpus, tasks, vocab
from kvjax.generate import LOOK_AHEAD

FULL = kvjax.zoo.full()
SEED = 2**32 + 1  # training seeds are below 2**32


def parser(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """The arguments that every script has; `defaults` replace theirs."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="testbed", help="a checkpoint directory (default: the shipped model)")
    p.add_argument("--text", type=Path, help="text to continue (default: held-out source code)")
    p.add_argument("--length", type=int, default=2048, help="tokens of a context")
    p.add_argument("--out", type=Path, default=Path("out"), help="folder for plots")
    p.add_argument("--seed", type=int, default=SEED)
    p.set_defaults(**defaults)
    return p


def add_quality(p: argparse.ArgumentParser, **defaults: Any) -> argparse.ArgumentParser:
    """The arguments of `measure`; `defaults` replace theirs."""
    p.add_argument("--tasks", type=words, default=["variables"], help="from: " + ", ".join(tasks.TASKS))
    p.add_argument("--contexts", type=int, default=32, help="per task; variables and copying ask 4 questions each")
    p.add_argument("--windows", type=int, default=16, help="windows of text")
    p.add_argument("--tokens", type=int, default=128, help="tokens of each window that are decoded, after --length")
    p.add_argument("--batch", type=int, default=8, help="rows at a time")
    p.add_argument(
        "--ask",
        choices=("prompt", "cache"),
        default="prompt",
        help="prompt: the question ends the exact prefill, as in the papers; cache: it is asked of the finished cache",
    )
    p.set_defaults(**defaults)
    return p


def words(text: str) -> list[str]:
    """Comma-separated words."""
    return [w.strip() for w in text.split(",") if w.strip()]


def numbers(text: str) -> list[int]:
    """Comma-separated integers."""
    return [int(w) for w in words(text)]


def run(main: Callable[[], None]) -> None:
    """Runs a script; what kvjax cannot use is said in one line."""
    try:
        main()
    except KvjaxError as e:
        sys.exit(f"error: {e}")


def knows_symbols(model: Model) -> bool:
    """Whether the model has the shipped model's vocabulary, which the recall tasks are written in."""
    return model.tokenizer is not None and model.tokenizer.inner.get_vocab() == vocab.tokenizer().get_vocab()


class Loop(Ours):
    """Greedy decoding from a state, with the guess before the first step that a method with lookahead needs."""

    def begin(self, last: jax.Array, state: State, room: int) -> None:
        super().begin(last, state, room)
        if self.method.lookahead and room:
            args = {"params": self.model.params, "carry": self.carry, "sampler": self.sampler}
            self.carry = LOOK_AHEAD(**args, setting=self.setting)


def encoded(model: Model, method: kvjax.Method, state: State) -> State:
    """The state that a method's prefill leaves, made from the one that `full` left."""
    setting = api.setting(model, method, state.capacity)
    layers = []
    for i, layer in enumerate(state.layers):
        k, v = memory.unpack(layer.k), memory.unpack(layer.v)
        layers.append(api.ENCODE(k=k, v=v, lengths=state.length, layer=i, setting=setting))
    return State(tuple(layers), state.length, state.capacity)


def make_instances(args: argparse.Namespace, task: str) -> list[tasks.Instance]:
    """`args.contexts` held-out instances of a task, in filler of code and of noise in turn."""
    if task not in tasks.TASKS:
        raise KvjaxError(f"unknown task {task!r}; use {', '.join(tasks.TASKS)}")
    fillers = (lambda rng, n: corpus.load("held_out").window(rng, n), tasks.noise)
    seeds = ([args.seed, list(tasks.TASKS).index(task), args.length, i] for i in range(args.contexts))
    return [tasks.TASKS[task](np.random.default_rng(s), args.length, fillers[i % 2]) for i, s in enumerate(seeds)]


def answers(
    model: Model, methods: Mapping[str, kvjax.Method], instances: Sequence[tasks.Instance], ask: str
) -> dict[str, list[bool]]:
    """Whether each question of a batch of contexts is answered exactly, greedily, under each method.

    The contexts are prefilled once, exactly; each method then encodes their keys and values, with the question
    ("prompt": the first answer token is exact, as in the papers) or without it ("cache": it is fed to the method).
    """
    right: dict[str, list[bool]] = {name: [] for name in methods}
    longest = max(len(q.prompt) + len(q.answer) for i in instances for q in i.questions)
    contexts = [i.context for i in instances]
    _, exact = api.prefill(model, contexts, FULL, capacity=max(map(len, contexts)) + longest)
    for asked in zip(*(i.questions for i in instances), strict=True):
        prompts, new = [q.prompt for q in asked], len(asked[0].answer)
        if ask == "prompt":
            logits, known = api.extend(model, prompts, exact, FULL)
        for name, method in methods.items():
            if ask == "prompt":
                loop = Loop(model, method)
                loop.begin(logits[:, -1], encoded(model, method, known), new - 1)
                if new > 1:
                    loop.decode(new - 1)
                out = loop.tokens.tolist()
            else:
                state = encoded(model, method, exact)
                out = kvjax.generate(model, prompts, method, max_new_tokens=new, state=state, eos_ids=()).tokens
            right[name] += [t == q.answer.tolist() for t, q in zip(out, asked, strict=True)]
    return right
