"""The public calls on a model and an explicit cache: logits, prefill, extend, score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.protocol import Cache, KVMethod
from kvjax.core.types import Array
from kvjax.engine import decode as engine_decode
from kvjax.engine.decode import num_draft_tokens
from kvjax.engine.forward import Target, exact_logits
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError
from kvjax.generation import checks
from kvjax.generation.compiled import compiled_for
from kvjax.generation.inputs import Prompts, pad, place, round_up, token_ids
from kvjax.generation.prompt_runner import run_prompts
from kvjax.generation.timing import Timer
from kvjax.models.model import Model
from kvjax.utils import arguments


def logits(model: Model, ids: Prompts) -> Array:
    """The exact uncached forward pass: f32[B T V], T the longest prompt; beyond a row's length it means nothing."""
    tokens, lengths = pad(token_ids(model, ids))
    checks.check_result(model, *tokens.shape)
    with Timer().timed():
        out = jax.block_until_ready(exact_logits(model.params, place(model, tokens, "B T"), config=model.config))
    return out[:, : int(lengths.max())]


def room(ids: Sequence[Sequence[int]], capacity: int | None, extra: int) -> int:
    """Capacity in tokens per row, checked against the longest prompt and `extra` tokens to come."""
    need = max(map(len, ids)) + extra
    if capacity is not None and arguments.integer("capacity", capacity, 0) < need:
        raise KvjaxError(
            f"capacity {capacity} is too small: the longest prompt has {need - extra} tokens and {extra} more are to "
            f"come; raise capacity to at least {need}, or shorten the prompt"
        )
    return round_up(need if capacity is None else capacity)


def prefill(
    model: Model,
    ids: Prompts,
    method: str | KVMethod,
    *,
    capacity: int | None = None,
    chunk: int | None = None,
    progress: bool = False,
) -> tuple[Array, Cache]:
    """Runs the prompts; returns (logits of each row's last token f32[B V], cache).

    method: a method or its string. capacity: tokens per row that the cache has room for, the prompt included (default:
    128 more than the longest). chunk: process so many tokens at a time (memory then holds the full keys and values of
    all layers at once, where otherwise one layer's suffice); progress: show a bar over the chunks.
    """
    ids = token_ids(model, ids)
    capacity = room(ids, capacity, 0 if capacity is not None else 128)
    return run_prompts(model, bind(method, model.config), ids, capacity, chunk=chunk, progress=progress)


def inputs_after_cache(
    model: Model, ids: Sequence[Sequence[int]], cache: Cache, extra: int = 0, width: int | None = None
) -> dict[str, Array]:
    """Padded tokens that follow a cache, checked against its rows and its room (`extra` more are to come)."""
    cache.check_usable()
    if len(ids) != cache.length.shape[0]:
        raise KvjaxError(f"{len(ids)} rows were given for a cache of {cache.length.shape[0]} rows")
    longest = max(map(len, ids))
    used = int(np.max(jax.device_get(cache.length)))
    need = used + longest + extra
    if need > cache.capacity:
        raise KvjaxError(
            f"the cache has room for {cache.capacity} tokens per row and holds {used}; {need - used} more do not fit: "
            f"prefill with capacity={need} or more, or read with that, or with a larger room="
        )
    checks.check_positions(model, cache.plan, used, longest)
    width = longest if width is None else arguments.integer("width", width, longest)
    tokens, lengths = pad(ids, min(width, cache.capacity - used))
    checks.check_result(model, *tokens.shape)
    return {"tokens": place(model, tokens, "B T"), "lengths": place(model, lengths, "B")}


def at_row_ends(out: Array, ids: Sequence[Sequence[int]]) -> Array:
    """Of logits f32[B T V] of rows of tokens, those of each row's last token, f32[B V]."""
    last = jnp.array([len(row) - 1 for row in ids])
    return jnp.take_along_axis(out, last[:, None, None], 1)[:, 0]


def extend(
    model: Model,
    ids: Prompts,
    cache: Cache,
    method: str | KVMethod | None = None,
    *,
    decoded: bool | Sequence[Sequence[bool]] = False,
) -> tuple[Array, Cache]:
    """Runs further tokens of every row on a cache: (logits f32[B T V], a new cache); the given cache stays usable.

    Rows may be of unequal length; beyond a row's length the logits mean nothing. method: the cache knows its own; one
    that is named must be that one. decoded: which tokens stand for what the method would decode, all or those marked
    in each row: one that looks ahead must guess these, as it does then, and is not told. Raises when the cache has no
    room, and when another model or method filled it.
    """
    cache, ids = checks.check_cache(model, cache, method), token_ids(model, ids)
    return extend_padded(model, ids, cache, decoded)


def extend_padded(
    model: Model,
    ids: Sequence[Sequence[int]],
    cache: Cache,
    decoded: bool | Sequence[Sequence[bool]] = False,
    width: int | None = None,
) -> tuple[Array, Cache]:
    """`extend` of lists of ids, padded to a width, so that rows of many lengths share one program."""
    args = inputs_after_cache(model, ids, cache, width=width)
    marks = _marks(ids, decoded)
    if num_draft_tokens(cache.plan) and any(map(any, marks)):
        known = [[not d for d in row[1:]] + [False] for row in marks]
        args["next_is_known"] = place(model, pad(known, args["tokens"].shape[1])[0] > 0, "B T")
    return extend_timed(model, cache, Timer(), **args)


def extend_timed(model: Model, cache: Cache, timer: Timer, tokens: Array, **more: Any) -> tuple[Array, Cache]:
    """`kvjax.engine.decode.extend`, timed; the given cache stays usable."""
    drafts = num_draft_tokens(cache.plan)
    rows, in_a_pass = tokens.shape[0], (1 + drafts if drafts else tokens.shape[1])
    shared, owned = (compiled_for(model, rows * in_a_pass, in_place=in_place) for in_place in (False, True))
    more |= {"compiled": shared, "compiled_after_first": owned}
    with timer.timed():
        out = engine_decode.extend(model.params, tokens, cache, Target(model.config, model.mesh), **more)
        return jax.block_until_ready(out)


def _marks(ids: Sequence[Sequence[int]], decoded: bool | Sequence[Sequence[bool]]) -> list[list[bool]]:
    """Which tokens of each row stand for decoded ones; raises KvjaxError unless all are marked or each by itself."""
    if isinstance(decoded, bool):
        return [[decoded] * len(row) for row in ids]
    lengths = [len(row) for row in ids]
    if not isinstance(decoded, Sequence) or [np.size(row) for row in decoded] != lengths:
        raise KvjaxError(f"decoded is true, false, or a list of them for each token of rows of {lengths} tokens")
    return [list(row) for row in decoded]


def score(model: Model, prompts: Prompts, continuations: Prompts, method: str | KVMethod) -> list[np.ndarray]:
    """Natural-log probabilities of each continuation's tokens after its prompt, under a method; one f32[T] per row."""
    prompts, continuations = token_ids(model, prompts), token_ids(model, continuations)
    if len(prompts) != len(continuations):
        raise KvjaxError(f"{len(prompts)} prompts but {len(continuations)} continuations; give one per prompt")
    longest = max(map(len, continuations))
    first, cache = prefill(model, prompts, method, capacity=max(map(len, prompts)) + longest)
    return [logp for logp, _ in forced(model, first, cache, continuations)]


def forced(
    model: Model,
    last: Array,
    cache: Cache,
    continuations: Sequence[Sequence[int]],
    decoded: bool | Sequence[Sequence[bool]] = True,
    width: int | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Teacher forcing from a cache and the logits f32[B V] of its last token; decoded and width as in `extend`.

    Per row: (the natural-log probability of each token f32[T], the likeliest token at its place i32[T]).
    """
    out, longest = last[:, None], max(map(len, continuations))
    marks = [row[:-1] or row for row in _marks(continuations, decoded)]
    if longest > 1:
        fed = [list(c[:-1]) or [0] for c in continuations]  # a row of one token feeds a token that nothing reads
        out = jnp.concatenate([out, extend_padded(model, fed, cache, marks, width)[0]], 1)
    tokens, _ = pad(continuations, out.shape[1])
    logp, likeliest = (np.asarray(x) for x in _scored(out, jnp.asarray(tokens)))
    return [(p[: len(c)], t[: len(c)]) for p, t, c in zip(logp, likeliest, continuations, strict=True)]


@jax.jit
def _scored(out: Array, tokens: Array) -> tuple[Array, Array]:
    """logits f32[B T V], tokens i32[B T] -> (their natural-log probabilities f32[B T], the likeliest i32[B T])."""
    return log_probs(out, tokens), out.argmax(-1).astype(jnp.int32)


@jax.jit
def log_probs(out: Array, tokens: Array) -> Array:
    """logits f32[B T V], tokens i32[B T] -> natural-log probabilities f32[B T]."""
    return jnp.take_along_axis(jax.nn.log_softmax(out, -1), tokens[..., None], -1)[..., 0]
