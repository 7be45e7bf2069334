"""A gate trained by gradient: which tokens of a context each head keeps, learned from the answers to later questions.

python -m experiments.gate [--steps 240]

A gate is a small network on a slot's key and value, one for each key/value head. In training it is soft: it adds the
log of a number between 0 and 1 to the slot's logits, and these numbers sum to the budget. The loss is that of answers
to questions which nobody knew when the context was read; its gradient comes back through `functional.extend` to what
the gate made of the cache that `functional.prefill` returned. The model stays as it is. In use the gate is hard: the
slots with the best scores stay. A bound method is static, so a gate's weights stay outside it, and act on the cache
between two calls.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import kvjax
from experiments.answers import HEADROOM, Questions, answer_nats, compress, draw, extend_each, measure, pack
from experiments.bench.measuring import log_progress, machine, make_parser, report, table
from experiments.papers import common
from kvjax import Config, Model, functional
from kvjax.cache.protocol import Cache
from kvjax.core.types import Array

TASKS = {"phrases": {"questions": 4}, "variables": {}}
"""The gate is trained on these, and measured on them and on `recall`, in filler of files that training never sees."""
UNSEEN = {"recall": {"questions": 4}}
WIDTH = 6  # tokens of a question and its answer, so that all tasks share one program
METHODS = ("random", "snapkv", "expected_attention", "keydiff", "turned_queries", "kvzip")
# Scores are multiplied by the first at the first step and by the second at the last: a soft choice becomes a hard one.
SHARPNESS = (2.0, 8.0)

Gate = dict[str, Array]
"""`first` f32[L K 2H W], `bias` f32[L K W] and `second` f32[L K W]."""


def init(config: Config, key: Array, width: int = 32) -> Gate:
    """A gate that scores slots at random."""
    first, second = jax.random.split(key)
    heads, inputs = (config.layers, config.kv_heads), 2 * config.head_dim
    return {
        "first": jax.random.normal(first, (*heads, inputs, width)) * inputs**-0.5,
        "bias": jnp.zeros((*heads, width)),
        "second": jax.random.normal(second, (*heads, width)) * width**-0.5,
    }


def scores(gate: Gate, cache: Cache) -> list[Array]:
    """Scores each layer's slots, f32[B K S]; -inf for empty ones."""
    found = []
    for i, (layer, state) in enumerate(zip(cache.plan, cache.layers, strict=True)):
        # A key's rotation says where it stands, which is not what the gate should look at.
        k = cache.config.rope.unrotate(layer.k.decode(state.k), state.pos)
        x = jnp.concatenate([_normalize(k, state.pos), _normalize(layer.v.decode(state.v), state.pos)], -1)
        hidden = jax.nn.gelu(jnp.einsum("bksi,kiw->bksw", x, gate["first"][i]) + gate["bias"][i][None, :, None])
        score = jnp.einsum("bksw,kw->bks", hidden, gate["second"][i])
        found.append(jnp.where(state.pos >= 0, score, -jnp.inf))
    return found


def _normalize(x: Array, pos: Array) -> Array:
    """Vectors [B K S H] over the root of their mean square in a head's filled slots."""
    square = (x**2).mean((2, 3), keepdims=True, where=(pos >= 0)[..., None])
    return x * lax.rsqrt(square + 1e-6)


def soft_choice(score: Array, budget: int, sharpness: Array, key: Array) -> Array:
    """Draws a soft choice: log of how much of each slot stays, f32[B K S], by which `budget` slots stay in each head.

    The sigmoid of scores with logistic noise (the concrete distribution; Maddison et al. 2017, arXiv 1611.00712).
    Without noise all slots would stay a little, and attention, whose logits lie far apart, would lose next to nothing.
    """
    noisy = sharpness * (score + jax.random.logistic(key, score.shape))
    score = jnp.where(jnp.isfinite(score), noisy, -1e4)

    def total(threshold: Array) -> Array:
        return jax.nn.sigmoid(score - threshold).sum(-1, keepdims=True)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        is_low = total(middle) > budget
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    largest = score.max(-1, keepdims=True) + 30.0
    threshold = lax.stop_gradient(lax.fori_loop(0, 30, halve, (largest - 120.0, largest))[0])
    # One step of Newton's method gives the threshold its gradient, without which all scores would only rise.
    chosen = jax.nn.sigmoid(score - threshold)
    slope = lax.stop_gradient((chosen * (1 - chosen)).sum(-1, keepdims=True))
    threshold = threshold + (chosen.sum(-1, keepdims=True) - budget) / jnp.maximum(slope, 1e-6)
    return jax.nn.log_sigmoid(score - threshold)


def with_choice(cache: Cache, choices: Sequence[Array]) -> Cache:
    """The cache, with what the gate chose softly added to the logits of its slots; what follows is never gated."""
    layers = []
    for state, choice in zip(cache.layers, choices, strict=True):
        layers.append(dataclasses.replace(state, bias=jnp.where(state.pos >= 0, choice, 0.0)))
    return dataclasses.replace(cache, layers=tuple(layers))


def keep_best(cache: Cache, gate: Gate, budget: int) -> Cache:
    """The cache without all slots but the best of each head."""
    layers = []
    for state, score in zip(cache.layers, scores(gate, cache), strict=True):
        last = lax.top_k(score, budget)[0][..., -1:]
        layers.append(dataclasses.replace(state, pos=jnp.where(score >= last, state.pos, -1)))
    return dataclasses.replace(cache, layers=tuple(layers))


def loss(gate: Gate, model: Model, plan: Any, asked: Questions, budget: int, sharpness: Array, key: Array) -> Array:
    """Nats per token of the answers, after contexts that the gate has softly reduced to a budget."""
    num, length = asked.contexts.shape
    lengths = jnp.full(num, length, jnp.int32)
    capacity = length + HEADROOM
    _, cache = functional.prefill(model.params, asked.contexts, lengths, plan, model.config, capacity)
    keys = jax.random.split(key, len(plan))
    choices = [soft_choice(x, budget, sharpness, k) for x, k in zip(scores(gate, cache), keys, strict=True)]
    logits = extend_each(model.params, asked.tokens, with_choice(cache, choices))
    return answer_nats(logits, asked.tokens, asked.is_answer)


def train(model: Model, args: argparse.Namespace) -> tuple[Gate, Gate, list[float]]:
    """The gate before and after training, and the losses on the way; each step has contexts of its own."""
    plan = functional.bind("full", model.config)
    optimizer = optax.adam(optax.cosine_decay_schedule(args.rate, args.steps))

    @jax.jit
    def step(gate: Gate, state: Any, arrays: tuple[Array, ...], part: Array, key: Array) -> tuple[Gate, Any, Array]:
        sharpness = SHARPNESS[0] + (SHARPNESS[1] - SHARPNESS[0]) * part
        value, gradient = jax.value_and_grad(loss)(gate, model, plan, Questions(*arrays), args.budget, sharpness, key)
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
            updates, state = optimizer.update(gradient, state, gate)
        return optax.apply_updates(gate, updates), state, value

    key = jax.random.key(args.seed)
    start = gate = init(model.config, key)
    state, losses, names = optimizer.init(gate), [], list(TASKS)
    for i in range(args.steps):
        task = names[i % len(names)]
        asked = pack(draw(task, args.batch, args.length, args.seed + i, "train", **TASKS[task]), WIDTH)
        arrays = asked.contexts, asked.tokens, asked.is_answer
        gate, state, value = step(gate, state, arrays, jnp.float32(i / args.steps), jax.random.fold_in(key, i))
        losses.append(float(value))
        if (i + 1) % max(args.steps // 6, 1) == 0:
            log_progress(f"step {i + 1} of {args.steps}: {np.mean(losses[-20:]):.3f} nats")
    return start, gate, losses


def run(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Loss and right answers by task and by what chooses."""
    start, trained, losses = train(model, args)
    found: dict[str, Any] = {}
    for task, sizes in (TASKS | UNSEEN).items():
        asked = pack(draw(task, args.contexts, args.length, common.SEED, "held_out", **sizes), WIDTH)
        full = compress(model, asked.contexts, "full")
        caches = {"full": full}
        caches |= {"the gate at its start": keep_best(full, start, args.budget)}
        caches |= {"the trained gate": keep_best(full, trained, args.budget)}
        for name, cache in caches.items():
            found.setdefault(name, {})[task] = measure(model, cache, asked)
        for method in args.methods:
            level = ",level=head" if method in ("turned_queries", "kvzip") else ""
            name = f"{method}:budget={args.budget}{level}"
            found.setdefault(name, {})[task] = measure(model, compress(model, asked.contexts, name), asked)
        log_progress(f"{task}: " + ", ".join(f"{name} {x[task]['nats']:.3f}" for name, x in found.items()))
    return {"losses": losses, "chosen_by": found}


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="testbed", help="the shipped model, or one of its vocabulary")
    parser.add_argument("--length", type=int, default=512, help="tokens of a context")
    parser.add_argument("--budget", type=int, default=64, help="tokens that a head keeps")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=4, help="contexts of a step")
    parser.add_argument("--rate", type=float, default=0.01, help="of Adam, at the start")
    parser.add_argument("--contexts", type=int, default=16, help="held-out contexts of each task")
    parser.add_argument(
        "--methods", type=lambda text: tuple(text.split(",")), default=METHODS, help="methods beside it"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    before, model = machine(), kvjax.load(args.model)
    results = run(model, args)
    names = (*TASKS, *UNSEEN)
    rows = [
        [name, *(f"{x[task][key]:{form}}" for task in names for key, form in (("nats", ".3f"), ("right", ".1%")))]
        for name, x in results["chosen_by"].items()
    ]
    title = f"Answers from {args.budget} of {args.length} tokens, {args.contexts} held-out contexts of each task"
    columns = ("chosen by", *(f"{task}, {what}" for task in names for what in ("nats", "right")))
    notes = [
        f"Trained on {', '.join(TASKS)}, {args.steps} steps of {args.batch} contexts; {', '.join(UNSEEN)} it never saw."
    ]
    report("gate", before, [table(title, columns, rows)], notes, {"settings": vars(args), **results})


if __name__ == "__main__":
    common.run_script(main)
