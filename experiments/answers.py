"""Questions about contexts as arrays, and the answers that a cache gives to them, through `kvjax.functional`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from experiments.papers.eviction import TASKS
from kvjax import functional
from kvjax.cache.protocol import Cache
from kvjax.core.types import Array
from kvjax.models.model import Model
from kvjax.testbed import corpus, tasks

HEADROOM = 32  # tokens that fit behind a context


@dataclasses.dataclass(frozen=True)
class Questions:
    """Contexts i32[B S] and texts that follow them, i32[B Q T]: each goes on from its context alone."""

    contexts: np.ndarray
    tokens: np.ndarray
    is_answer: np.ndarray  # bool[B Q T]


def draw(task: str, num: int, length: int, seed: int, split: str, **sizes: Any) -> list[tasks.Instance]:
    """Instances of a task in filler of the "train" or the "held_out" files."""
    filler = corpus.load(split).window
    seeds = ([seed, list(TASKS).index(task), length, i] for i in range(num))
    return [TASKS[task](np.random.default_rng(s), length, filler, **sizes) for s in seeds]


def pack(instances: Sequence[tasks.Instance], width: int | None = None) -> Questions:
    """Questions and answers of instances that have equally many, padded on the right to `width` (None: the longest)."""
    width = width or max(len(q.prompt) + len(q.answer) for i in instances for q in i.questions)
    shape = len(instances), len(instances[0].questions), width
    tokens, is_answer = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for b, instance in enumerate(instances):
        for j, q in enumerate(instance.questions):
            end = len(q.prompt) + len(q.answer)
            tokens[b, j, :end] = [*q.prompt, *q.answer]
            is_answer[b, j, len(q.prompt) : end] = True
    return Questions(np.stack([i.context for i in instances]), tokens, is_answer)


def compress(model: Model, contexts: np.ndarray, method: str) -> Cache:
    """The cache of contexts i32[B S] under a method, with room for what follows."""
    num, length = contexts.shape
    plan = functional.bind(method, model.config)
    lengths = np.full(num, length, np.int32)
    return functional.prefill(model.params, contexts, lengths, plan, model.config, length + HEADROOM)[1]


def extend_each(params: Any, tokens: Array, cache: Cache) -> Array:
    """Logits f32[B Q T V] of Q texts [B Q T], each after the same cache, which none of them changes."""
    return jax.vmap(lambda text: functional.extend(params, text, cache)[0], 1, 1)(tokens)


def answer_nats(logits: Array, tokens: Array, is_answer: Array) -> Array:
    """Mean cross entropy of the answers' tokens."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :, :-1], tokens[:, :, 1:])
    return losses.mean(where=is_answer[:, :, 1:])


def is_right(logits: Array, asked: Questions) -> np.ndarray:
    """bool[B Q]: each token of the answer is the likeliest after those before it, as in greedy generation."""
    hit = np.asarray(logits)[:, :, :-1].argmax(-1) == asked.tokens[:, :, 1:]
    return (hit | ~asked.is_answer[:, :, 1:]).all(-1)


_extend_each = jax.jit(extend_each)


def measure(model: Model, cache: Cache, asked: Questions) -> dict[str, Any]:
    """Share of answers that are right, the same by question bool[B Q], and nats per token of the right answers."""
    logits = _extend_each(model.params, asked.tokens, cache)
    right = is_right(logits, asked)
    return {
        "right": float(right.mean()),
        "by_context": [float(x) for x in right.mean(1)],
        "nats": float(answer_nats(logits, asked.tokens, asked.is_answer)),
    }
