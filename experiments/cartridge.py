"""A cache distilled by gradient: 64 slots of trained keys and values against 64 slots that evictions keep.

python -m experiments.cartridge [--contexts 4 --steps 400]

Each context holds many facts; a question asks for one of them (`phrases`, 4 symbols). The keys and values of the slots
are the parameters (Cartridges; Eyuboglu et al. 2025, arXiv 2506.06266): Adam lowers the KL divergence from the model's
next-token distributions after the full context to those after the slots. The training texts are self-study, made of the
context alone: pieces of it, which the model repeats, and questions about its symbols that the model answers. Half of
the facts are never asked about in training: the held-out questions are about these.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvjax
from experiments.answers import HEADROOM, Questions, compress, draw, extend_each, measure, pack
from experiments.bench.measuring import log_progress, machine, make_parser, report, table
from experiments.papers import common
from kvjax import Model, functional
from kvjax.cache.protocol import Cache
from kvjax.core.types import Array
from kvjax.testbed.vocab import ASK, SYMBOLS

SLOTS = 64
CHUNK = 16  # tokens of a piece of the context that is repeated; two pieces overlap by half
ANSWER = 4  # tokens that the model answers to a question about a symbol
METHODS = (
    "kvzip:budget=64",
    "kvzip:budget=64,level=head",
    "turned_queries:budget=64",
    "turned_queries:budget=64,level=head",
    "keydiff:budget=64",
    "expected_attention:budget=64",
    "snapkv:budget=64",
    "h2o:heavy=32,recent=32",
    "streaming_llm:recent=60,sinks=4",
    "random:budget=64",
)
STARTS = ("first tokens", "turned_queries:budget=64,level=head", "kvzip:budget=64")
"""The slots start from the context's first tokens, as in the paper, or from the tokens that an eviction keeps."""


def first_tokens(model: Model, contexts: np.ndarray, num: int = SLOTS) -> Cache:
    """A cache that holds the first tokens alone, and whose text goes on at the contexts' end."""
    length = contexts.shape[1]
    cache = compress(model, contexts[:, :num], "full")
    return dataclasses.replace(cache, length=jnp.full_like(cache.length, length), capacity=length + HEADROOM)


def slots_of(cache: Cache) -> list[Array]:
    """The numbers of a cache that are trained: keys and values, wherever its method stores them."""
    return [x for x in jax.tree.leaves(cache) if jnp.issubdtype(x.dtype, jnp.floating)]


def with_slots(cache: Cache, slots: Sequence[Array]) -> Cache:
    """The cache with other keys and values at the same positions."""
    others = iter(slots)
    return jax.tree.map(lambda x: next(others) if jnp.issubdtype(x.dtype, jnp.floating) else x, cache)


@functools.partial(jax.jit, static_argnames="num_tokens")
def answers(params: Any, prompts: Array, cache: Cache, num_tokens: int) -> Array:
    """The model's own answers i32[B Q num_tokens] to prompts i32[B Q T], greedily."""

    def answer(prompt: Array) -> Array:
        logits, asked = functional.extend(params, prompt, cache)
        first = logits[:, -1].argmax(-1)
        rest, _ = functional.decode(params, asked, first, num_tokens - 1)
        return jnp.concatenate([first[:, None], rest], 1)

    return jax.vmap(answer, 1, 1)(prompts)


def self_study(model: Model, full: Cache, contexts: np.ndarray, held_out: np.ndarray) -> list[np.ndarray]:
    """Makes training texts: i32[B N CHUNK] pieces of the contexts, and i32[B M 2 + ANSWER] questions with answers.

    held_out: keys i32[B n] that no question is asked about.
    """
    starts = np.arange(0, contexts.shape[1] - CHUNK + 1, CHUNK // 2)
    pieces = contexts[:, starts[:, None] + np.arange(CHUNK)]
    asked = []
    for context, left_out in zip(contexts, held_out, strict=True):
        symbols = np.setdiff1d(context[np.isin(context, SYMBOLS)], left_out)
        asked.append(np.stack([np.full_like(symbols, ASK), symbols], 1))
    prompts = np.stack(asked).astype(np.int32)
    return [pieces, np.concatenate([prompts, answers(model.params, prompts, full, ANSWER)], 2)]


def divergence(
    slots: Sequence[Array], params: Any, cache: Cache, texts: Sequence[Array], targets: Sequence[Array]
) -> Array:
    """KL divergence per token from the targets, log-probabilities f32[B Q T V], each kind of text counting the same."""
    terms = []
    for tokens, target in zip(texts, targets, strict=True):
        found = jax.nn.log_softmax(extend_each(params, tokens, with_slots(cache, slots)))
        terms.append((jnp.exp(target) * (target - found)).sum(-1).mean())
    return sum(terms) / len(terms)


def distill(
    model: Model,
    full: Cache,
    start: Cache,
    texts: Sequence[np.ndarray],
    steps: int,
    batch: int,
    rate: float,
    seed: int = 0,
) -> tuple[Cache, list[float]]:
    """Trains the slots of `start` on texts whose targets come from the full cache; returns them and the divergences."""
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    log_probabilities = jax.jit(lambda tokens: jax.nn.log_softmax(extend_each(model.params, tokens, full)))
    targets = [np.asarray(log_probabilities(tokens)) for tokens in texts]

    @jax.jit
    def step(
        slots: list[Array], state: Any, texts: list[Array], targets: list[Array]
    ) -> tuple[list[Array], Any, Array]:
        loss, gradient = jax.value_and_grad(divergence)(slots, model.params, start, texts, targets)
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
            updates, state = optimizer.update(gradient, state, slots)
        return optax.apply_updates(slots, updates), state, loss

    rng, slots, losses = np.random.default_rng(seed), slots_of(start), []
    state = optimizer.init(slots)
    for i in range(steps):
        drawn = [rng.permutation(tokens.shape[1])[:batch] for tokens in texts]
        chosen = [tokens[:, at] for tokens, at in zip(texts, drawn, strict=True)]
        wanted = [target[:, at] for target, at in zip(targets, drawn, strict=True)]
        slots, state, loss = step(slots, state, chosen, wanted)
        losses.append(float(loss))
        if (i + 1) % max(steps // 6, 1) == 0:
            log_progress(f"step {i + 1} of {steps}: divergence {np.mean(losses[-20:]):.4f}")
    return with_slots(start, slots), losses


def halves(asked: Questions) -> dict[str, Questions]:
    """Questions that training may ask, and those that it may not."""
    half = asked.tokens.shape[1] // 2
    cuts = {"asked in training": slice(half), "held out": slice(half, None)}
    return {
        name: Questions(asked.contexts, asked.tokens[:, cut], asked.is_answer[:, cut]) for name, cut in cuts.items()
    }


def run(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that the table shows, by name of the cache."""
    sizes = {"pairs": args.pairs, "questions": args.pairs}
    asked = pack(draw("phrases", args.contexts, args.length, args.seed, "held_out", **sizes))
    parts = halves(asked)
    full = compress(model, asked.contexts, "full")
    found: dict[str, Any] = {}

    def add(name: str, cache: Cache, **more: Any) -> None:
        found[name] = {when: measure(model, cache, part) for when, part in parts.items()} | more
        log_progress(f"{name}: " + ", ".join(f"{when} {found[name][when]['right']:.3f}" for when in parts))

    add("full", full)
    texts = self_study(model, full, asked.contexts, parts["held out"].tokens[:, :, 1])
    for start in args.starts:
        is_eviction = start != STARTS[0]
        cache = compress(model, asked.contexts, start) if is_eviction else first_tokens(model, asked.contexts)
        add(start, cache)
        trained, losses = distill(model, full, cache, texts, args.steps, args.batch, args.rate)
        ends = {"first_divergence": losses[0], "last_divergence": float(np.mean(losses[-20:]))}
        add(f"distilled from {start}", trained, **ends)
    for method in (m for m in args.methods if m not in found):
        add(method, compress(model, asked.contexts, method))
    return {"texts": {"pieces": texts[0].shape[1], "questions": texts[1].shape[1]}, "caches": found}


def main(argv: Sequence[str] | None = None) -> None:
    def listed(text: str) -> tuple[str, ...]:
        return tuple(map(str.strip, text.split(";")))

    parser = make_parser(__doc__)
    parser.add_argument("--model", default="testbed", help="the shipped model, or one of its vocabulary")
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="tokens of a context")
    parser.add_argument("--pairs", type=int, default=48, help="facts of a context, an even number")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16, help="texts of each kind and context in a step")
    parser.add_argument("--rate", type=float, default=0.02, help="of Adam, at the start")
    parser.add_argument("--methods", type=listed, default=METHODS, help='evictions, separated by ";"')
    parser.add_argument("--starts", type=listed, default=STARTS, help="the same, and first tokens")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args(argv)
    before, model = machine(), kvjax.load(args.model)
    results = run(model, args)
    rows = [
        [
            name,
            *(
                f"{x[when][key]:{form}}"
                for when in ("held out", "asked in training")
                for key, form in (("right", ".1%"), ("nats", ".3f"))
            ),
        ]
        for name, x in results["caches"].items()
    ]
    title = f"Answers from {SLOTS} slots for {args.pairs} facts in {args.length} tokens, {args.contexts} contexts"
    columns = ("cache", "held out, right", "nats per token", "asked in training, right", "nats per token")
    notes = [
        f"Training texts of a context: {results['texts']['pieces']} pieces, {results['texts']['questions']} questions."
    ]
    report(
        "cartridge",
        before,
        [table(title, columns, rows)],
        notes,
        {"settings": vars(args) | {"slots": SLOTS}, **results},
    )


if __name__ == "__main__":
    common.run_script(main)
