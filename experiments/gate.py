"""A gate trained by gradient: it learns from the answers to later questions which tokens each head keeps.

python -m experiments.gate [--steps 240]

A gate is a small network on a slot's key and value, one for each key/value head. In training it is soft: it adds the
log of a number between 0 and 1 to the slot's logits, and these numbers sum to the budget. The loss is the cross entropy
of answers to questions that come after the context. Its gradient flows through `functional.extend` to the gated cache
of `functional.prefill`; the model stays frozen. In use the gate is hard: the slots with the best scores stay. A bound
method is static, so the gate's weights cannot be part of it; they act on the cache between two calls.
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
from experiments.answers import HEADROOM_TOKENS, Questions, answer_nats, compress, extend_each, measure, pack
from experiments.bench.measuring import log_progress, machine, make_parser, report, table
from experiments.papers import common
from experiments.papers.eviction import draw_instances
from kvjax import Config, Model, functional
from kvjax.cache.protocol import Cache
from kvjax.core.types import Array

TASKS = {"phrases": {"questions": 4}, "variables": {}}
"""Training tasks and their sizes; measurements use filler from held-out files, and the tasks of UNSEEN too."""
UNSEEN = {"recall": {"questions": 4}}
QUESTION_TOKENS = 6  # with the answer; one width, so that all tasks share one program
METHODS = ("random", "snapkv", "expected_attention", "keydiff", "turned_queries", "kvzip")
# Factors of the scores at the first and the last step: the soft choice hardens during training.
SHARPNESS = (2.0, 8.0)

Gate = dict[str, Array]
"""`first` f32[L K 2H W], `bias` f32[L K W] and `second` f32[L K W]."""


def init(config: Config, key: Array, width: int = 32) -> Gate:
    """Initializes a gate of random weights."""
    first, second = jax.random.split(key)
    a = config.kind(0).attention
    heads, inputs = (config.layers, a.kv_heads), 2 * a.head_dim
    return {
        "first": jax.random.normal(first, (*heads, inputs, width)) * inputs**-0.5,
        "bias": jnp.zeros((*heads, width)),
        "second": jax.random.normal(second, (*heads, width)) * width**-0.5,
    }


def score_slots(gate: Gate, cache: Cache) -> list[Array]:
    """Scores each layer's slots, f32[B K S]; -inf for empty ones."""
    found = []
    for i, (layer, state) in enumerate(zip(cache.plan, cache.layers, strict=True)):
        # Without rotation the gate cannot select by position.
        k = cache.config.kind(0).attention.rope.unrotate(layer.k.decode(state.k), state.pos)
        x = jnp.concatenate([_normalize(k, state.pos), _normalize(layer.v.decode(state.v), state.pos)], -1)
        hidden = jax.nn.gelu(jnp.einsum("bksi,kiw->bksw", x, gate["first"][i]) + gate["bias"][i][None, :, None])
        score = jnp.einsum("bksw,kw->bks", hidden, gate["second"][i])
        found.append(jnp.where(state.pos >= 0, score, -jnp.inf))
    return found


def _normalize(x: Array, pos: Array) -> Array:
    """Divides vectors [B K S H] by their root mean square over a head's filled slots."""
    square = (x**2).mean((2, 3), keepdims=True, where=(pos >= 0)[..., None])
    return x * lax.rsqrt(square + 1e-6)


def soft_choice(score: Array, budget: int, sharpness: Array, key: Array) -> Array:
    """Draws a soft choice of `budget` slots in each head.

    The choice is a sigmoid of scores with logistic noise (the concrete distribution; Maddison et al. 2017, arXiv
    1611.00712). Without noise every slot would keep a small weight, which hardly changes attention: its logits differ
    by far more.

    Args:
      score: f32[B K S], -inf for empty slots.
      budget: sum of the weights in a head.
      sharpness: factor of the scores.
      key: of the noise.

    Returns:
      f32[B K S], the log of each slot's weight between 0 and 1.
    """
    noisy = sharpness * (score + jax.random.logistic(key, score.shape))
    # A finite number for empty slots: infinities would turn the gradient into NaN.
    score = jnp.where(jnp.isfinite(score), noisy, -1e4)

    def total(threshold: Array) -> Array:
        return jax.nn.sigmoid(score - threshold).sum(-1, keepdims=True)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        is_low = total(middle) > budget
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    # At 30 above the best score all weights together are nothing. 30 halvings of a bracket of 120 end at 1e-7, below
    # what float32 tells apart at such scores.
    largest = score.max(-1, keepdims=True) + 30.0
    threshold = lax.stop_gradient(lax.fori_loop(0, 30, halve, (largest - 120.0, largest))[0])
    # One Newton step gives the threshold its gradient; with a constant threshold all scores would only rise.
    chosen = jax.nn.sigmoid(score - threshold)
    slope = lax.stop_gradient((chosen * (1 - chosen)).sum(-1, keepdims=True))
    threshold = threshold + (chosen.sum(-1, keepdims=True) - budget) / jnp.maximum(slope, 1e-6)
    return jax.nn.log_sigmoid(score - threshold)


def add_choice(cache: Cache, choices: Sequence[Array]) -> Cache:
    """Adds the log weights of a soft choice to the logits of the cache's slots; later tokens are not gated."""
    layers = []
    for state, choice in zip(cache.layers, choices, strict=True):
        layers.append(dataclasses.replace(state, bias=jnp.where(state.pos >= 0, choice, 0.0)))
    return dataclasses.replace(cache, layers=tuple(layers))


def keep_best(cache: Cache, gate: Gate, budget: int) -> Cache:
    """Drops all slots but the `budget` best of each head."""
    layers = []
    for state, score in zip(cache.layers, score_slots(gate, cache), strict=True):
        # Slots that equal the last one stay, too; scores of a network practically never do.
        last = lax.top_k(score, budget)[0][..., -1:]
        layers.append(dataclasses.replace(state, pos=jnp.where(score >= last, state.pos, -1)))
    return dataclasses.replace(cache, layers=tuple(layers))


def loss(
    gate: Gate, model: Model, plan: Any, questions: Questions, *, budget: int, sharpness: Array, key: Array
) -> Array:
    """Nats per token of the answers after contexts that the gate has softly reduced to a budget."""
    num, length = questions.contexts.shape
    lengths = jnp.full(num, length, jnp.int32)
    capacity = length + HEADROOM_TOKENS
    _, cache = functional.prefill(model.params, questions.contexts, lengths, plan, model.config, capacity)
    keys = jax.random.split(key, len(plan))
    choices = [soft_choice(x, budget, sharpness, k) for x, k in zip(score_slots(gate, cache), keys, strict=True)]
    logits = extend_each(model.params, questions.tokens, add_choice(cache, choices))
    return answer_nats(logits, questions.tokens, questions.is_answer)


def train(model: Model, args: argparse.Namespace) -> tuple[Gate, Gate, list[float]]:
    """Trains a gate; returns it before and after training, and the losses. Each step draws new contexts."""
    plan = functional.bind("full", model.config)
    optimizer = optax.adam(optax.cosine_decay_schedule(args.rate, args.steps))

    @jax.jit
    def step(gate: Gate, state: Any, arrays: tuple[Array, ...], progress: Array, key: Array) -> tuple[Gate, Any, Array]:
        sharpness = SHARPNESS[0] + (SHARPNESS[1] - SHARPNESS[0]) * progress
        options = {"budget": args.budget, "sharpness": sharpness, "key": key}
        value, gradient = jax.value_and_grad(loss)(gate, model, plan, Questions(*arrays), **options)
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
            updates, state = optimizer.update(gradient, state, gate)
        return optax.apply_updates(gate, updates), state, value

    key = jax.random.key(args.seed)
    start = gate = init(model.config, key)
    state, losses, names = optimizer.init(gate), [], list(TASKS)
    for i in range(args.steps):
        task = names[i % len(names)]
        instances = draw_instances(task, args.batch, args.length, args.seed + i, "train", **TASKS[task])
        questions = pack(instances, QUESTION_TOKENS)
        arrays = questions.contexts, questions.tokens, questions.is_answer
        gate, state, value = step(gate, state, arrays, jnp.float32(i / args.steps), jax.random.fold_in(key, i))
        losses.append(float(value))
        if (i + 1) % max(args.steps // 6, 1) == 0:
            log_progress(f"step {i + 1} of {args.steps}: {np.mean(losses[-20:]):.3f} nats")
    return start, gate, losses


def run(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Trains a gate; measures it, the exact cache and the methods on every task."""
    start, trained, losses = train(model, args)
    found: dict[str, Any] = {}
    for task, sizes in (TASKS | UNSEEN).items():
        # No training step can have had this seed, and the filler is from other files.
        instances = draw_instances(task, args.contexts, args.length, common.SEED, "held_out", **sizes)
        questions = pack(instances, QUESTION_TOKENS)
        full = compress(model, questions.contexts, "full")
        gates = {"the gate at its start": start, "the trained gate": trained}
        caches = {"full": full} | {name: keep_best(full, gate, args.budget) for name, gate in gates.items()}
        for name, cache in caches.items():
            found.setdefault(name, {})[task] = measure(model, cache, questions)
        for method in args.methods:
            # The gate's heads keep equally many tokens; these two would divide one budget over the model.
            level = ",level=head" if method in ("turned_queries", "kvzip") else ""
            name = f"{method}:budget={args.budget}{level}"
            found.setdefault(name, {})[task] = measure(model, compress(model, questions.contexts, name), questions)
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
    parser.add_argument("--methods", type=common.split_words, default=METHODS, help="methods to compare")
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
    columns = ("selected by", *(f"{task}, {unit}" for task in names for unit in ("nats", "right")))
    notes = [
        f"Trained on {', '.join(TASKS)}, {args.steps} steps of {args.batch} contexts; never on {', '.join(UNSEEN)}."
    ]
    report("gate", before, [table(title, columns, rows)], notes, {"settings": vars(args), **results})


if __name__ == "__main__":
    common.run_script(main)
