"""Calls on a model and an explicit cache: logits, prefill, extend and score, with checks, padding and timing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.protocol import Cache, KVMethod, num_layer_slots
from kvjax.core.explicit_axes import accepts_explicit_axes, leave_explicit_mesh, spec_of
from kvjax.core.mesh import to_numpy
from kvjax.core.types import Array
from kvjax.engine import decode as engine_decode
from kvjax.engine import prefill as engine_prefill
from kvjax.engine.forward import BoundLayers, Progress, exact_logits
from kvjax.engine.plan import bind
from kvjax.errors import KvjaxError
from kvjax.generation import user_warnings
from kvjax.generation.finite import check_logits
from kvjax.generation.inputs import (
    Prompts,
    are_empty,
    check_cache,
    check_room,
    pad,
    place,
    require_same_call,
    round_up,
    token_ids,
)
from kvjax.generation.programs import Timer, target_for
from kvjax.models.model import Model
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords
from kvjax.utils.parameter_types import MAX_SIZE

Decoded = bool | Sequence[Sequence[bool]]
"""Whether tokens stand for decoded ones: all of them, or each by itself. A method that drafts must predict a decoded
token, as it does in generation; the others are known to it in advance."""


_returns_types = accepts_explicit_axes(
    lambda result, *_, **__: jax.tree.map(spec_of, result),
    lambda model, *_, **__: model.mesh if isinstance(model, Model) else None,
)
"""Returns arrays as the model's parameters are: with types, on a mesh with `Explicit` axes."""


@checks_keywords
@_returns_types
def logits(model: Model, ids: Prompts) -> Array:
    """Runs the exact forward pass without a cache.

    Args:
      model: from `kvjax.load`.
      ids: texts, or lists of ids.

    Returns:
      Logits f32[B T V], where T is the longest prompt; beyond a sequence's length they mean nothing.
    """
    ids = token_ids(model, ids, begins=True)
    tokens, lengths = pad(ids)
    require_same_call(model, (), ids)
    # LongRoPE chooses for each text, as transformers does for texts one by one.
    configs = [model.config.for_length(n) for n in lengths.tolist()]
    with Timer().timed():  # for its errors; the seconds are not read
        placed, out = place(model, tokens, "B T"), None
        for config in dict.fromkeys(configs):
            under = exact_logits(model.auto_params, placed, config=config)
            is_own = place(model, np.array([x == config for x in configs]), "B")
            out = under if out is None else jnp.where(is_own[:, None, None], under, out)
        out = jax.block_until_ready(out)
    check_logits(model, out, ids)
    return out[:, : int(lengths.max())]


@checks_keywords
@_returns_types
def prefill(
    model: Model,
    ids: Prompts,
    method: str | KVMethod,
    *,
    capacity: int | None = None,
    chunk: int | None = None,
    prompt_memory: str = "device",
    progress: bool = False,
) -> tuple[Array, Cache]:
    """Runs prompts and compresses them under a method.

    Args:
      model: from `kvjax.load`.
      ids: texts, or lists of ids.
      method: a method or its string.
      capacity: tokens that a sequence of the cache may grow to, the prompt included; by default 128 more than the
        longest prompt has.
      chunk: tokens run at a time, layer by layer; None for all at once, or as the method asks.
      prompt_memory: "host" keeps in pinned host memory what would fill the device under methods that compress no layer
        before all have read the prompt, such as budgets over the model: exact keys and values. "device" by default.
      progress: whether to show a bar over the chunks.

    Returns:
      Logits of each prompt's last token f32[B V], and the cache.
    """
    ids = token_ids(model, ids, begins=True)
    rounded = capacity_for(ids, capacity, 0 if capacity is not None else 128)
    model = model_for(model, ids, capacity or 0)
    options: dict[str, Any] = {"chunk": chunk, "prompt_memory": prompt_memory, "progress": progress}
    return run_prompts(model, bind(method, model.config), ids, rounded, **options)


def capacity_for(ids: Sequence[Sequence[int]], capacity: int | None, num_new: int) -> int:
    """Rounds up the capacity in tokens per sequence; raises KvjaxError unless the prompts and `num_new` tokens fit."""
    longest = max(map(len, ids))
    need, most = longest + num_new, -round_up(-MAX_SIZE)  # rounded down, as capacities are rounded up
    remedy = (
        f": the longest prompt has {longest} tokens and {num_new} more are to come, and positions are 32-bit integers; "
        "ask for fewer new tokens, for less room, or shorten the prompt"
    )
    capacity = need if capacity is None else capacity
    return round_up(arguments.integer("capacity", capacity, min(need, most), most, remedy))


def model_for(model: Model, ids: Sequence[Sequence[int]], num_tokens: int) -> Model:
    """Returns the model for texts that begin with these ids: LongRoPE chooses its factors, once for all of the texts.

    Args:
      model: of the call.
      ids: of the prompts.
      num_tokens: to which the call says that a text may grow. Room that a call leaves by default does not count, so
        that texts within the original context take the factors for short ones.
    """
    num_tokens = max(num_tokens, *map(len, ids))
    user_warnings.warn_of_long_factors(model, min(map(len, ids)), num_tokens)
    return model.with_config(model.config.for_length(num_tokens))


def run_prompts(
    model: Model,
    plan: BoundLayers,
    ids: Sequence[Sequence[int]],
    capacity: int,
    *,
    chunk: int | None = None,
    prompt_memory: str = "device",
    width: int | None = None,
    progress: bool = False,
    timer: Timer | None = None,
) -> tuple[Array, Cache]:
    """Runs prompts that are lists of ids; arguments as in `prefill`, with a bound plan in place of the method.

    Args:
      width: tokens that prompts are padded to; None for the next multiple of 64.
      timer: adds up the seconds.

    Returns:
      Logits of each prompt's last token f32[B V], and the cache.
    """
    timer = timer or Timer()
    require_same_call(model, plan, ids, capacity=capacity, chunk=chunk, width=width, prompt_memory=prompt_memory)
    if prompt_memory not in ("device", "host"):
        raise KvjaxError(f'prompt_memory must be "device" or "host", got {prompt_memory!r:.80}')
    lengths = tuple(map(len, ids))
    num_slots = tuple(num_layer_slots(layer, lengths, capacity) for layer in plan)
    method_chunk = min((layer.needs.prompt_chunk for layer in plan if layer.needs.prompt_chunk), default=None)
    if chunk is not None and arguments.integer("chunk", chunk) and method_chunk:
        raise KvjaxError("this method feeds a prompt in chunks of its own; leave `chunk` out")
    padded = width or round_up(max(lengths))
    tokens_at_once = chunk or method_chunk or padded
    user_warnings.warn_of_positions(model, plan, 0, max(lengths))
    # A method's own chunks end at the padded length; user-set chunks are equal, so that they share one program.
    tokens, lengths = pad(ids, padded if chunk is None else round_up(padded, chunk))
    tokens_at_once = min(tokens_at_once, tokens.shape[1])
    target = target_for(model, len(ids) * tokens_at_once, in_place=True, num_logits=len(ids))
    if tokens_at_once == tokens.shape[1]:  # chunks are cut from NumPy arrays, which compiles nothing
        tokens = place(model, tokens, "B T")

    bar: Progress = iter
    if progress:
        from rich.progress import track  # imported late, as only a bar needs it

        bar = functools.partial(track, description="prefill", transient=True)
    with timer.timed():
        outputs = engine_prefill.prefill(
            model.auto_params,
            cast(Array, tokens),
            place(model, lengths, "B"),
            plan,
            target,
            capacity,
            chunk=chunk,
            num_slots=num_slots,
            replay_prompts=replay_prompts(model, plan),
            prompt_memory=prompt_memory,
            progress=bar,
        )
        last, cache = jax.block_until_ready(outputs)
    check_logits(model, last, ids)
    return last, dataclasses.replace(cache, weights=model.fingerprint)


def replay_prompts(model: Model, plan: BoundLayers) -> tuple[list[int], list[int]]:
    """Encodes the texts that come before the first and before every later chunk that the model repeats (KVzip)."""
    replay = next((layer.needs.replay for layer in plan if layer.needs.replay), None)
    if replay is None or model.tokenizer is None:
        return [], []
    first, later = (model.tokenizer.encode_continuation(text) if text else [] for text in (replay.first, replay.later))
    return first, later


@checks_keywords
@_returns_types
def extend(
    model: Model, ids: Prompts, cache: Cache, method: str | KVMethod | None = None, *, decoded: Decoded = False
) -> tuple[Array, Cache]:
    """Runs further tokens of every sequence on a cache, which stays usable.

    Args:
      model: the model that filled the cache.
      ids: texts or lists of ids, of any lengths. A sequence whose text is empty stays as it is, while others go on.
      cache: from `prefill` or `extend`.
      method: None, or the method of the cache; another one is an error.
      decoded: whether the tokens stand for decoded ones, all of them or each by itself; see `Decoded`.

    Returns:
      Logits f32[B T V], which mean nothing beyond a sequence's length, and a new cache.

    Raises:
      KvjaxError: a cache without room for the tokens, or one that another model or method filled; logits that are not
        finite.
    """
    cache = check_cache(model, cache, method)
    ids = token_ids(model, ids, begins=are_empty(cache), count=cache.length.shape[0], may_be_empty=True)
    out, longer = extend_padded(model, ids, cache, decoded)
    check_logits(model, out, ids, what="the tokens fed to sequence")
    return out, longer


def extend_padded(
    model: Model,
    ids: Sequence[Sequence[int]],
    cache: Cache,
    decoded: Decoded = False,
    width: int | None = None,
    *,
    num_new: int = 0,
    timer: Timer | None = None,
) -> tuple[Array, Cache]:
    """`extend` for lists of ids, padded to a width, so that sequences of many lengths share one program.

    Raises KvjaxError unless they fit, and `num_new` generated tokens after them; `timer` adds up the seconds.
    """
    cache = leave_explicit_mesh(cache)
    require_same_call(model, cache.plan, ids, decoded=decoded, width=width, capacity=cache.capacity)
    model, longest = model.with_config(cache.config), max(map(len, ids))
    used = check_room(cache, longest + num_new)
    user_warnings.warn_of_positions(model, cache.plan, used, longest)
    width = longest if width is None else arguments.integer("width", width, longest)
    tokens, lengths = pad(ids, min(width, cache.capacity - used))
    num_drafts, mask, next_is_known = engine_decode.num_draft_tokens(cache.plan), _decoded_mask(ids, decoded), None
    if num_drafts and any(map(any, mask)):
        known = [[not is_decoded for is_decoded in row[1:]] + [False] for row in mask]
        next_is_known = place(model, pad(known, tokens.shape[1])[0] > 0, "B T")
    inputs = {"lengths": place(model, lengths, "B"), "next_is_known": next_is_known}
    # A method with drafts is fed one token at a time, each with its drafts; the cache is the caller's at the first step
    # only, so that later ones may donate it.
    num_tokens = len(ids) * (1 + num_drafts if num_drafts else tokens.shape[1])
    first, later = (target_for(model, num_tokens, in_place=in_place) for in_place in (False, True))
    tokens = place(model, tokens, "B T")
    with (timer or Timer()).timed():
        outputs = engine_decode.extend(model.auto_params, tokens, cache, first, target_after_first=later, **inputs)
        return jax.block_until_ready(outputs)


def last_logits(
    model: Model, out: Array, ids: Sequence[Sequence[int]], cache: Cache, before: Array | None = None
) -> Array:
    """Takes the logits f32[B V] of each sequence's last token from those of all that followed a cache, f32[B T V].

    A sequence that nothing was fed to keeps its logits, `before` f32[B V]; where these are unknown, f32[B 0], so are
    all of the result. Raises KvjaxError where logits are not finite.
    """
    at = jnp.array([max(len(row) - 1, 0) for row in ids])
    last = jnp.take_along_axis(out, at[:, None, None], 1)[:, 0]
    if not all(ids):
        assert before is not None
        last = jnp.where(jnp.array([bool(row) for row in ids])[:, None], last, before) if before.shape[1] else before
    check_logits(model, last, ids, what="the tokens fed to sequence")
    return last


def _decoded_mask(ids: Sequence[Sequence[int]], decoded: Decoded) -> list[list[bool]]:
    """Expands `decoded` to one boolean per token; raises KvjaxError for lists of other lengths."""
    if isinstance(decoded, bool):
        return [[decoded] * len(row) for row in ids]
    lengths = [len(row) for row in ids]
    if not isinstance(decoded, Sequence) or [np.size(row) for row in decoded] != lengths:
        raise KvjaxError(f"decoded is true, false, or a list of them for each token of sequences of {lengths} tokens")
    return [list(row) for row in decoded]


@checks_keywords
def score(model: Model, prompts: Prompts, continuations: Prompts, method: str | KVMethod) -> list[np.ndarray]:
    """Scores a continuation of each prompt under a method.

    Args:
      model: from `kvjax.load`.
      prompts: texts, or lists of ids.
      continuations: one per prompt.
      method: a method or its string.

    Returns:
      The natural-log probabilities of each continuation's tokens, f32[T] per sequence.
    """
    prompts = token_ids(model, prompts, begins=True)
    continuations = token_ids(model, continuations, begins=False, count=len(prompts))
    longest = max(map(len, continuations))
    num_tokens = max(len(prompt) + len(more) - 1 for prompt, more in zip(prompts, continuations, strict=True))
    model = model_for(model, prompts, num_tokens)
    capacity = capacity_for(prompts, None, longest)
    last, cache = run_prompts(model, bind(method, model.config), prompts, capacity)
    return [logp for logp, _ in teacher_force(model, last, cache, continuations)]


def teacher_force(
    model: Model,
    last: Array,
    cache: Cache,
    continuations: Sequence[Sequence[int]],
    decoded: Decoded = True,
    width: int | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Feeds given continuations, lists of ids, to a cache; `decoded` and `width` as in `extend_padded`.

    `last` f32[B V] are the logits of the cache's last token.

    Returns:
      For each sequence the natural-log probability of each token f32[T], and the likeliest token in its place i32[T].
    """
    check_logits(model, last, what="the text before continuation")
    out, longest = last[:, None], max(map(len, continuations))
    # The last token of a continuation is scored and never fed.
    mask = [row[:-1] or row for row in _decoded_mask(continuations, decoded)]
    if longest > 1:
        fed = [list(c[:-1]) or [0] for c in continuations]  # the logits of that 0 are not read
        following = extend_padded(model, fed, cache, mask, width)[0]
        num_read = [len(c) - 1 for c in continuations]
        check_logits(model, following, fed, lengths=num_read, what="the continuation of sequence")
        out = jnp.concatenate([out, following], 1)
    tokens, _ = pad(continuations, out.shape[1])
    logp, likeliest = (to_numpy(x) for x in _score_tokens(out, jnp.asarray(tokens)))
    return [(p[: len(c)], t[: len(c)]) for p, t, c in zip(logp, likeliest, continuations, strict=True)]


@jax.jit
def _score_tokens(out: Array, tokens: Array) -> tuple[Array, Array]:
    return log_probs(out, tokens), out.argmax(-1).astype(jnp.int32)


@jax.jit
def log_probs(out: Array, tokens: Array) -> Array:
    """Computes the natural-log probabilities f32[B T] of tokens i32[B T] under logits f32[B T V]."""
    return jnp.take_along_axis(jax.nn.log_softmax(out, -1), tokens[..., None], -1)[..., 0]
