"""Questions about contexts as arrays, and answers from a cache through `kvjax.functional`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from kvjax import functional
from kvjax.cache.protocol import Cache
from kvjax.core.types import Array
from kvjax.models.model import Model
from kvjax.testbed import tasks

HEADROOM_TOKENS = 32  # of a question and its answer after a context; longer ones would be dropped silently


@dataclasses.dataclass(frozen=True)
class Questions:
    """Contexts and their questions with answers; every question follows its context alone."""

    contexts: np.ndarray  # i32[B S]
    tokens: np.ndarray  # i32[B Q T] of Q questions, each with its answer
    is_answer: np.ndarray  # bool[B Q T]


def pack(instances: Sequence[tasks.Instance], width: int | None = None) -> Questions:
    """Stacks instances with equally many questions, padded on the right to `width` tokens (None: the longest)."""
    width = width or max(len(q.prompt) + len(q.answer) for i in instances for q in i.questions)
    assert width <= HEADROOM_TOKENS, f"questions of {width} tokens do not fit behind a context"
    shape = len(instances), len(instances[0].questions), width
    tokens, is_answer = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for b, instance in enumerate(instances):
        for j, q in enumerate(instance.questions):
            end = len(q.prompt) + len(q.answer)
            # Padding on the right needs no mask: attention is causal, and only the answers' tokens are scored.
            tokens[b, j, :end] = [*q.prompt, *q.answer]
            is_answer[b, j, len(q.prompt) : end] = True
    return Questions(np.stack([i.context for i in instances]), tokens, is_answer)


def compress(model: Model, contexts: np.ndarray, method: str) -> Cache:
    """Compresses contexts i32[B S] under a method, with space for HEADROOM_TOKENS more."""
    num, length = contexts.shape
    plan = functional.bind(method, model.config)
    lengths = np.full(num, length, np.int32)
    return functional.prefill(model.params, contexts, lengths, plan, model.config, length + HEADROOM_TOKENS)[1]


def extend_each(params: Any, tokens: Array, cache: Cache) -> Array:
    """Logits f32[B Q T V] of texts i32[B Q T], all after the same, unchanged cache."""

    def extend_one(text: Array) -> Array:
        return functional.extend(params, text, cache)[0]

    # The map is over questions alone: all of them read one copy of the context's keys and values.
    return jax.vmap(extend_one, 1, 1)(tokens)


def answer_nats(logits: Array, tokens: Array, is_answer: Array) -> Array:
    """Mean cross entropy of the answers' tokens, in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :, :-1], tokens[:, :, 1:])
    return losses.mean(where=is_answer[:, :, 1:])


def is_right(logits: Array, questions: Questions) -> np.ndarray:
    """Marks the answers that greedy generation would write, bool[B Q]."""
    # Teacher forcing suffices: as long as every token was the likeliest, greedy decoding has fed the same tokens.
    hit = np.asarray(logits)[:, :, :-1].argmax(-1) == questions.tokens[:, :, 1:]
    return (hit | ~questions.is_answer[:, :, 1:]).all(-1)


_extend_each = jax.jit(extend_each)


def measure(model: Model, cache: Cache, questions: Questions) -> dict[str, Any]:
    """Fraction of right answers, in all and by context, and nats per token of the reference answers."""
    logits = _extend_each(model.params, questions.tokens, cache)
    right = is_right(logits, questions)
    return {
        "right": float(right.mean()),
        "by_context": [float(x) for x in right.mean(1)],
        "nats": float(answer_nats(logits, questions.tokens, questions.is_answer)),
    }
