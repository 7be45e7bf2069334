"""Lists of ids into caches: `kvjax.engine.prefill` with checks, padding, a progress bar and the time that it takes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax

from kvjax.cache.protocol import Cache, num_layer_slots
from kvjax.core.types import Array
from kvjax.engine.forward import Plan, Target
from kvjax.engine.prefill import prefill
from kvjax.errors import KvjaxError
from kvjax.generation import checks
from kvjax.generation.compiled import compiled_for
from kvjax.generation.inputs import pad, place, round_up
from kvjax.generation.timing import Timer
from kvjax.models.model import Model
from kvjax.utils import arguments


def run_prompts(
    model: Model,
    plan: Plan,
    ids: Sequence[Sequence[int]],
    capacity: int,
    *,
    chunk: int | None = None,
    width: int | None = None,
    progress: bool = False,
    timer: Timer | None = None,
) -> tuple[Array, Cache]:
    """Runs prompts.

    Args:
      model: the model.
      plan: a method bound to each layer.
      ids: the prompts, lists of ids.
      capacity: tokens that a sequence of the cache may grow to.
      chunk: tokens run at a time; default all at once.
      width: what prompts are padded to; default what suits the longest.
      progress: whether to show a bar over the chunks.
      timer: adds up the seconds.

    Returns:
      Logits of each prompt's last token f32[B V], and the cache.
    """
    timer = timer or Timer()
    lengths = tuple(map(len, ids))
    num_slots = tuple(num_layer_slots(layer, lengths, capacity) for layer in plan)
    chunk_of_method = _chunk_of_method(plan, chunk)
    padded = width or round_up(max(lengths))
    at_once = chunk or chunk_of_method or padded
    checks.check_prompts(model, plan, lengths, num_slots, capacity, padded, at_once)
    # Chunks of a method's own end where its slots do; those that a caller sets are equal, to share one program.
    tokens, lengths = pad(ids, padded if chunk is None else round_up(padded, chunk))
    at_once = min(at_once, tokens.shape[1])
    compiled = compiled_for(model, len(ids) * at_once, in_place=True, logits_of=len(ids))
    if at_once == tokens.shape[1]:
        tokens = place(model, tokens, "B T")
    with timer.timed():
        out = prefill(
            model.params,
            cast(Array, tokens),
            place(model, lengths, "B"),
            plan,
            Target(model.config, model.mesh),
            capacity,
            chunk=chunk,
            num_slots=num_slots,
            replay_prompts=replay_prompts(model, plan),
            compiled=compiled,
            progress=_track if progress else iter,
        )
        last, cache = jax.block_until_ready(out)
    return last, dataclasses.replace(cache, weights=model.fingerprint)


def replay_prompts(model: Model, plan: Plan) -> tuple[list[int], list[int]]:
    """The ids that a method puts before a chunk which the model repeats: before the first one, before every other."""
    replay = next((layer.needs.replay for layer in plan if layer.needs.replay), None)
    if replay is None or model.tokenizer is None:
        return [], []
    encode = functools.partial(model.tokenizer.encode, special_tokens=False)
    return encode(replay.first) if replay.first else [], encode(replay.later) if replay.later else []


def _chunk_of_method(plan: Plan, chunk: int | None) -> int | None:
    """Tokens at a time that the method itself asks for; raises KvjaxError where the caller asks too."""
    restricted = min((layer.needs.prompt_chunk for layer in plan if layer.needs.prompt_chunk), default=None)
    if chunk is not None:
        arguments.integer("chunk", chunk)
        if restricted:
            raise KvjaxError("this method feeds a prompt in chunks of its own; leave `chunk` out")
    return restricted


def _track(numbers: Any) -> Any:
    from rich.progress import track  # here, as only a bar needs it

    return track(numbers, "prefill", transient=True)
