"""Quality of a method on a model: contexts are prefilled once, then asked and scored on their state."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from kvjax import api
from kvjax.eval.tasks import Instance
from kvjax.generate import generate
from kvjax.kv.method import Method
from kvjax.kv.state import State
from kvjax.model import Model


def answers(model: Model, method: Method, instances: Sequence[Instance]) -> tuple[list[list[bool]], State]:
    """Whether each question of each instance is answered exactly, greedily, on the state of its context alone.

    The instances form one batch and must have equally many questions. Returns also the contexts' state.
    """
    longest = max(len(q.prompt) + len(q.answer) for i in instances for q in i.questions)
    contexts = [i.context for i in instances]
    _, state = api.prefill(model, contexts, method, capacity=max(map(len, contexts)) + longest)
    right: list[list[bool]] = [[] for _ in instances]
    for asked in zip(*(i.questions for i in instances), strict=True):
        new = max(len(q.answer) for q in asked)
        out = generate(model, [q.prompt for q in asked], method, max_new_tokens=new, state=state, eos_ids=())
        for row, q, tokens in zip(right, asked, out.tokens, strict=True):
            row.append(q.right(tokens))
    return right, state


def continuation(model: Model, method: Method, tokens: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Teacher-forced: tokens i32[B T], of which the first `context` are prefilled and the rest decoded.

    Returns (log-probabilities in nats f32[B T-context], the likeliest token at each of these places).
    """
    first, state = api.prefill(model, tokens[:, :context], method, capacity=tokens.shape[1])
    rest, _ = api.extend(model, tokens[:, context:-1], state, method, decoded=True)
    logits = jnp.concatenate([first[:, None], rest], 1)
    target = jnp.asarray(tokens[:, context:], jnp.int32)
    return np.asarray(api.log_probs(logits, target)), np.asarray(logits.argmax(-1))
