"""The second pass over a prompt: it is repeated piece by piece behind itself, and methods look at what that reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.contract import Probe
from kvjax.core.types import Array, KvjaxError
from kvjax.models.model import Model
from kvjax.run.by_layer import through
from kvjax.run.clock import Clock
from kvjax.run.forward import Plan
from kvjax.run.passes import Repeat, repeated_positions, sites
from kvjax.run.prompts import pad, place
from kvjax.run.reading import Prompt


def probed(
    model: Model,
    ids: Sequence[Sequence[int]],
    prompts: Sequence[Any],
    lengths: Array,
    plan: Plan,
    clock: Clock,
) -> list[Any]:
    """The prompts of all layers with what a second pass said of them; raises KvjaxError for two different passes."""
    wanted = {layer.needs.probe for layer in plan} - {None}
    if len(wanted) != 1 or any(layer.needs.chunk for layer in plan):
        raise KvjaxError("all layers repeat the prompt in one way, and read it whole before; use one method for all")
    how = wanted.pop()
    prompts = [_blank(prompt) if layer.needs.probe else prompt for layer, prompt in zip(plan, prompts, strict=True)]
    where = sites(plan, model.config)
    for start in range(0, max(map(len, ids)), how.chunk):
        rows = repetitions(model, ids, start, how)
        tokens, count = pad(rows, _longest(model, how, prompts[0].k.shape[2]))
        tokens, count = place(model, tokens, "B T"), place(model, count, "B")
        pos = jnp.maximum(repeated_positions(tokens, count, lengths), 0)
        with clock.timed():
            work = Repeat(jnp.int32(start), count, lengths)
            _, prompts = jax.block_until_ready(through(model, tokens, pos, work, where, prompts, clock))
    return list(prompts)


def repetitions(model: Model, ids: Sequence[Sequence[int]], start: int, how: Probe) -> list[list[int]]:
    """What each row reads to repeat its piece that begins at `start`; nothing where it has none."""
    told = _told(model, how.later if start else how.first)
    lead = min(how.lead, start)
    return [[*told, *row[start - lead : start + how.chunk]] if len(row) > start else [] for row in ids]


def _longest(model: Model, how: Probe, width: int) -> int:
    """The width that holds every repetition of prompts in this width, so that all share one program."""
    told = max(len(_told(model, text)) for text in (how.first, how.later))
    return told + how.lead + min(how.chunk, width)


def _told(model: Model, text: str) -> list[int]:
    if model.tokenizer is None or not text:
        return []
    return model.tokenizer.encode(text, special_tokens=False)


def _blank(prompt: Prompt) -> Prompt:
    return prompt._replace(probed=jnp.zeros(prompt.k.shape[:3], np.float32))
