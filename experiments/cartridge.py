"""A cache distilled by gradient: 64 slots of trained keys and values against 64 slots kept by eviction.

python -m experiments.cartridge [--contexts 4 --steps 400]

Each context has many facts; a question asks for one of them (`phrases`, 4 symbols). The keys and values of the slots
are the parameters (Cartridges; Eyuboglu et al. 2025, arXiv 2506.06266): Adam lowers the KL divergence from the model's
next-token distributions after the full context to those after the slots. The training texts are self-study, made from
the context alone: chunks of it, which the model repeats, and questions about its symbols, which the model answers. The
held-out questions are about the half of the facts that training never asks about.
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
from experiments.answers import HEADROOM_TOKENS, Questions, compress, extend_each, measure, pack
from experiments.bench.measuring import log_progress, machine, make_parser, report, table
from experiments.papers import common
from experiments.papers.eviction import draw_instances
from kvjax import Model, functional
from kvjax.cache.protocol import Cache
from kvjax.core.types import Array
from kvjax.testbed.vocab import ASK, SYMBOLS

NUM_SLOTS = 64
CHUNK_TOKENS = 16  # of a repeated chunk of the context; neighbors overlap by half
ANSWER_TOKENS = 4  # that the model generates for a question about a symbol
# The two best scorers stand under both divisions: 64 slots in every head cannot hold what one budget for the model can.
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
"""Initial slots: the context's first tokens, as in the paper, or the tokens that an eviction method keeps."""


def keep_first_tokens(model: Model, contexts: np.ndarray, num: int = NUM_SLOTS) -> Cache:
    """A cache of the contexts' first tokens alone, whose next position follows the whole contexts."""
    # The rest need not be read: under causal attention it changes nothing in the first tokens' keys and values.
    length = contexts.shape[1]
    cache = compress(model, contexts[:, :num], "full")
    return dataclasses.replace(cache, length=jnp.full_like(cache.length, length), capacity=length + HEADROOM_TOKENS)


def slot_arrays(cache: Cache) -> list[Array]:
    """The trained arrays of a cache: keys and values, in any form that the method stores."""
    # Positions, lengths and page tables are integers, and keep the place in the text that a slot stands for.
    return [x for x in jax.tree.leaves(cache) if jnp.issubdtype(x.dtype, jnp.floating)]


def replace_slots(cache: Cache, slots: Sequence[Array]) -> Cache:
    """Replaces the keys and values of a cache; positions stay."""
    arrays = iter(slots)
    return jax.tree.map(lambda x: next(arrays) if jnp.issubdtype(x.dtype, jnp.floating) else x, cache)


@functools.partial(jax.jit, static_argnames="num_tokens")
def generate_answers(params: Any, prompts: Array, cache: Cache, num_tokens: int) -> Array:
    """Generates answers i32[B Q num_tokens] to prompts i32[B Q T], greedily."""

    def answer(prompt: Array) -> Array:
        logits, extended = functional.extend(params, prompt, cache)
        first = logits[:, -1].argmax(-1)
        rest, _ = functional.decode(params, extended, first, num_tokens - 1)
        return jnp.concatenate([first[:, None], rest], 1)

    return jax.vmap(answer, 1, 1)(prompts)


def self_study(model: Model, full: Cache, contexts: np.ndarray, held_out: np.ndarray) -> list[np.ndarray]:
    """Makes the training texts from the contexts alone.

    Args:
      model: the model.
      full: the exact cache of the contexts.
      contexts: i32[B S].
      held_out: i32[B n], keys of the facts that no training question asks about.

    Returns:
      chunks of the contexts i32[B N CHUNK_TOKENS], and questions with answers i32[B M 2 + ANSWER_TOKENS].
    """
    starts = np.arange(0, contexts.shape[1] - CHUNK_TOKENS + 1, CHUNK_TOKENS // 2)
    chunks = contexts[:, starts[:, None] + np.arange(CHUNK_TOKENS)]
    questions = []
    for context, left_out in zip(contexts, held_out, strict=True):
        # Questions are about values, too: which symbols are keys is something that only the context says. The model
        # answers such a question somehow, and the trained cache has to give the same answer.
        symbols = np.setdiff1d(context[np.isin(context, SYMBOLS)], left_out)
        questions.append(np.stack([np.full_like(symbols, ASK), symbols], 1))
    prompts = np.stack(questions).astype(np.int32)
    return [chunks, np.concatenate([prompts, generate_answers(model.params, prompts, full, ANSWER_TOKENS)], 2)]


def divergence(
    slots: Sequence[Array], params: Any, cache: Cache, texts: Sequence[Array], targets: Sequence[Array]
) -> Array:
    """KL divergence per token from the targets, log-probabilities f32[B Q T V]; all kinds of text weigh the same."""
    terms = []
    for tokens, target in zip(texts, targets, strict=True):
        log_probs = jax.nn.log_softmax(extend_each(params, tokens, replace_slots(cache, slots)))
        # Targets are whole distributions, as in the paper's context distillation: they say more than sampled tokens.
        terms.append((jnp.exp(target) * (target - log_probs)).sum(-1).mean())
    return sum(terms) / len(terms)


def distill(
    model: Model,
    full: Cache,
    start: Cache,
    texts: Sequence[np.ndarray],
    *,
    steps: int,
    batch: int,
    rate: float,
    seed: int = 0,
) -> tuple[Cache, list[float]]:
    """Trains the slots of a cache so that the model predicts texts as after the full cache.

    Args:
      model: the model, which stays as it is.
      full: the exact cache, whose next-token distributions are the targets.
      start: the cache whose keys and values are trained.
      texts: of `self_study`.
      steps: of Adam.
      batch: texts of each kind and context in a step.
      rate: of Adam at the start; it decays to zero along a cosine.
      seed: of the choice of texts.

    Returns:
      the trained cache, and the divergence in every step.
    """
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))

    @jax.jit
    def log_probabilities(tokens: Array) -> Array:
        return jax.nn.log_softmax(extend_each(model.params, tokens, full))

    # The full cache and the texts never change, so their targets are computed once.
    targets = [np.asarray(log_probabilities(tokens)) for tokens in texts]

    @jax.jit
    def step(
        slots: list[Array], state: Any, texts: list[Array], targets: list[Array]
    ) -> tuple[list[Array], Any, Array]:
        loss, gradient = jax.value_and_grad(divergence)(slots, model.params, start, texts, targets)
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
            updates, state = optimizer.update(gradient, state, slots)
        return optax.apply_updates(slots, updates), state, loss

    rng, slots, losses = np.random.default_rng(seed), slot_arrays(start), []
    state = optimizer.init(slots)
    for i in range(steps):
        drawn = [rng.permutation(tokens.shape[1])[:batch] for tokens in texts]
        step_texts = [tokens[:, at] for tokens, at in zip(texts, drawn, strict=True)]
        step_targets = [target[:, at] for target, at in zip(targets, drawn, strict=True)]
        slots, state, loss = step(slots, state, step_texts, step_targets)
        losses.append(float(loss))
        if (i + 1) % max(steps // 6, 1) == 0:
            log_progress(f"step {i + 1} of {steps}: divergence {np.mean(losses[-20:]):.4f}")
    return replace_slots(start, slots), losses


def split_questions(questions: Questions) -> dict[str, Questions]:
    """Splits the questions into those of the training and the held-out ones."""
    half = questions.tokens.shape[1] // 2
    cuts = {"asked in training": slice(half), "held out": slice(half, None)}
    contexts, tokens, is_answer = questions.contexts, questions.tokens, questions.is_answer
    return {name: Questions(contexts, tokens[:, cut], is_answer[:, cut]) for name, cut in cuts.items()}


def run(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Measures every cache, by name: the full one, the evictions, and each start before and after training."""
    sizes = {"pairs": args.pairs, "questions": args.pairs}
    questions = pack(draw_instances("phrases", args.contexts, args.length, args.seed, "held_out", **sizes))
    parts = split_questions(questions)
    full = compress(model, questions.contexts, "full")
    found: dict[str, Any] = {}

    def add(name: str, cache: Cache, **more: Any) -> None:
        found[name] = {when: measure(model, cache, part) for when, part in parts.items()} | more
        log_progress(f"{name}: " + ", ".join(f"{when} {found[name][when]['right']:.3f}" for when in parts))

    add("full", full)
    held_out_keys = parts["held out"].tokens[:, :, 1]  # a question is `<ask> key`
    texts = self_study(model, full, questions.contexts, held_out_keys)
    for start in args.starts:
        if start == STARTS[0]:
            cache = keep_first_tokens(model, questions.contexts)
        else:
            cache = compress(model, questions.contexts, start)
        add(start, cache)
        trained, losses = distill(model, full, cache, texts, steps=args.steps, batch=args.batch, rate=args.rate)
        # Each step has other texts, so that the last loss alone would say little.
        ends = {"first_divergence": losses[0], "last_divergence": float(np.mean(losses[-20:]))}
        add(f"distilled from {start}", trained, **ends)
    for method in (m for m in args.methods if m not in found):  # a start is an eviction, too
        add(method, compress(model, questions.contexts, method))
    return {"texts": {"pieces": texts[0].shape[1], "questions": texts[1].shape[1]}, "caches": found}


def main(argv: Sequence[str] | None = None) -> None:
    def parse_methods(text: str) -> tuple[str, ...]:
        return tuple(map(str.strip, text.split(";")))

    parser = make_parser(__doc__)
    parser.add_argument("--model", default="testbed", help="the shipped model, or one of its vocabulary")
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="tokens of a context")
    # With 32 facts in 512 tokens, evictions over the model answer nearly all: nothing would be left to gain.
    parser.add_argument("--pairs", type=int, default=48, help="facts of a context, an even number")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16, help="texts of each kind and context in a step")
    parser.add_argument("--rate", type=float, default=0.02, help="of Adam, at the start")
    parser.add_argument("--methods", type=parse_methods, default=METHODS, help='evictions, separated by ";"')
    parser.add_argument("--starts", type=parse_methods, default=STARTS, help='the same, and "first tokens"')
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args(argv)
    before, model = machine(), kvjax.load(args.model)
    results = run(model, args)
    rows = []
    for name, x in results["caches"].items():
        held_out, trained = ((f"{x[w]['right']:.1%}", f"{x[w]['nats']:.3f}") for w in ("held out", "asked in training"))
        rows.append([name, *held_out, *trained])
    title = f"Answers from {NUM_SLOTS} slots for {args.pairs} facts in {args.length} tokens, {args.contexts} contexts"
    columns = ("cache", "held out, right", "nats per token", "asked in training, right", "nats per token")
    texts = results["texts"]
    notes = [f"Training texts of a context: {texts['pieces']} chunks, {texts['questions']} questions."]
    settings = vars(args) | {"slots": NUM_SLOTS}
    report("cartridge", before, [table(title, columns, rows)], notes, {"settings": settings, **results})


if __name__ == "__main__":
    common.run_script(main)
