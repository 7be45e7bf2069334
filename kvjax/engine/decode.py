"""New tokens on a cache: one step, further tokens, and a decode loop of fixed length."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Float32, Int32, Key

from kvjax.cache.protocol import Cache
from kvjax.cache.reading_layer import ReadingLayer
from kvjax.core.types import Array
from kvjax.engine.forward import (
    BoundLayers,
    Target,
    embed,
    layer_calls,
    outer_params,
    run_layers,
    scan_if_traced,
)
from kvjax.engine.layer_prompt import LayerCall
from kvjax.engine.modes import Decode
from kvjax.engine.sampling import Sampler, sample, sequence_keys
from kvjax.models.config import Config
from kvjax.models.decoder import Angles


def num_draft_tokens(plan: BoundLayers) -> int:
    """Number of draft tokens that follow the true token in each step (SpeCache: 1)."""
    return max(layer.needs.draft_tokens for layer in plan)


def max_tokens_of_step(plan: BoundLayers) -> int | None:
    """Returns how many tokens a step may bring at most, None for any number.

    Layers that read another layer's cache see it after the step, when some of many tokens may have left it already.
    """
    limits = (layer.source.readable_tokens for layer in plan if isinstance(layer, ReadingLayer))
    return min((limit for limit in limits if limit is not None), default=None)


def step(
    params: Any,
    tokens: Int32[Array, "B T"],
    cache: Cache,
    commit: int,
    target: Target,
    lengths: Int32[Array, " B"] | None = None,
) -> tuple[Float32[Array, "B T V"], Cache]:
    """Runs new tokens in one pass, and keeps the first `commit` of them.

    Args:
      params: the decoder's parameters.
      tokens: ids, padded on the right.
      cache: what the tokens follow.
      commit: static; tokens beyond it are drafts and leave no trace.
      target: model configuration, mesh and compiled functions.
      lengths: how many tokens of each sequence are real; None for all.

    Returns:
      Logits, which mean nothing for padding, and the new cache.
    """
    outer = outer_params(params)
    # One small program: run eagerly, each of its operations would be a dispatch of its own in every step.
    hidden, angles, pos, length = _begin_step(outer, tokens, cache.length, lengths, commit=commit, target=target)
    calls = _decode_calls(cache.plan, target.config)
    mode = Decode(pos, commit)
    hidden, states = run_layers(params, hidden, angles, mode, calls, cache.layers, target=target)
    return target.unembed(outer, hidden, target=target), dataclasses.replace(cache, layers=states, length=length)


@functools.lru_cache(maxsize=1024)
def _decode_calls(plan: BoundLayers, config: Config) -> tuple[LayerCall, ...]:
    """Returns the layers of a plan in a decode step."""
    # Layers that differ only in what they do with prompts become equal here, and share one program.
    return layer_calls(tuple(getattr(layer, "after_prompt", layer) for layer in plan), config)


@functools.partial(jax.jit, static_argnames=("commit", "target"))
def _begin_step(
    params: Any,
    tokens: Int32[Array, "B T"],
    length: Int32[Array, " B"],
    lengths: Int32[Array, " B"] | None,
    commit: int,
    target: Target,
) -> tuple[Float[Array, "B T D"], Angles, Int32[Array, "B T"], Int32[Array, " B"]]:
    """Embeds the tokens of a step; returns the results of `embed` and the cache's length after the step."""
    hidden, angles, pos = embed(params, tokens, length, lengths, target=target)
    return hidden, angles, pos, length + (commit if lengths is None else jnp.minimum(commit, lengths))


def extend(
    params: Any,
    tokens: Int32[Array, "B T"],
    cache: Cache,
    target: Target,
    *,
    lengths: Int32[Array, " B"] | None = None,
    next_is_known: Bool[Array, "B T"] | None = None,
    target_after_first: Target | None = None,
) -> tuple[Float32[Array, "B T V"], Cache]:
    """Runs further tokens of every sequence, and keeps them.

    A method that drafts (SpeCache) is fed the tokens one at a time, each with a draft of the next: the given token
    where `next_is_known`, else the model's prediction.

    Args:
      params: the decoder's parameters.
      tokens: ids, padded on the right.
      cache: what the tokens follow.
      target: model configuration and mesh.
      lengths: how many tokens of each sequence are real; None for all.
      next_is_known: None for all; see above.
      target_after_first: for the second and later steps, which may donate the cache: no caller holds it.

    Returns:
      Logits, which mean nothing for padding, and a new cache.
    """
    B, T = tokens.shape
    most = max_tokens_of_step(cache.plan)
    if most is not None and T > most:
        return _extend_in_parts(params, tokens, cache, most, target, lengths, target_after_first or target)
    if not num_draft_tokens(cache.plan):
        return step(params, tokens, cache, T, target, lengths)
    lengths = jnp.full(B, T, jnp.int32) if lengths is None else lengths
    # The first token runs twice: here, committed nowhere, for the prediction that its own step needs as a draft.
    first, cache = step(params, tokens[:, :1], cache, 0, target, jnp.minimum(lengths, 1))
    predicted = first[:, 0].argmax(-1).astype(jnp.int32)

    def run_token(carry: tuple[Cache, Array], xs: tuple[Array, ...]) -> tuple[tuple[Cache, Array], Array]:
        (cache, predicted), (t, token, next_token, is_known) = carry, xs
        draft = jnp.where(is_known & (t + 1 < lengths), next_token, predicted)
        pair, num_real = jnp.stack([token, draft], 1), jnp.where(t < lengths, 2, 0)
        logits, cache = step(params, pair, cache, 1, target_after_first or target, num_real)
        return (cache, logits[:, 1].argmax(-1).astype(jnp.int32)), logits[:, 0]

    next_tokens = jnp.pad(tokens[:, 1:], [(0, 0), (0, 1)])
    is_known = jnp.ones((B, T), bool) if next_is_known is None else next_is_known
    xs = jnp.arange(T, dtype=jnp.int32), tokens.T, next_tokens.T, is_known.T
    (cache, _), logits = scan_if_traced(run_token, (cache, predicted), xs)
    return jnp.moveaxis(logits, 0, 1), cache


def _extend_in_parts(
    params: Any,
    tokens: Int32[Array, "B T"],
    cache: Cache,
    size: int,
    target: Target,
    lengths: Int32[Array, " B"] | None,
    target_after_first: Target,
) -> tuple[Float32[Array, "B T V"], Cache]:
    """Runs `size` tokens at a time, where layers that read another layer's cache would miss some of more of them."""
    B, T = tokens.shape
    lengths = jnp.full(B, T, jnp.int32) if lengths is None else lengths
    num_parts = -(-T // size)
    parts = jnp.pad(tokens, [(0, 0), (0, num_parts * size - T)]).reshape(B, num_parts, size).swapaxes(0, 1)
    counts = jnp.clip(lengths[None] - size * jnp.arange(num_parts, dtype=jnp.int32)[:, None], 0, size)
    first, cache = step(params, parts[0], cache, size, target, counts[0])

    def run_part(cache: Cache, xs: tuple[Array, Array]) -> tuple[Cache, Array]:
        part, count = xs
        logits, cache = step(params, part, cache, size, target_after_first, count)
        return cache, logits

    cache, others = scan_if_traced(run_part, cache, (parts[1:], counts[1:]))
    logits = jnp.moveaxis(jnp.concatenate([first[None], others]), 0, 1)
    return logits.reshape(B, num_parts * size, -1)[:, :T], cache


def decode(
    params: Any,
    cache: Cache,
    tokens: Int32[Array, " B"],
    num_tokens: int,
    *,
    target: Target,
    sampler: Sampler,
    key: Key[Array, ""],
) -> tuple[Int32[Array, "B num_tokens"], Cache]:
    """Generates a fixed number of tokens in one `lax.scan`; arguments and results as in `kvjax.functional.decode`.

    Each token is drawn with the randomness that it has in `kvjax.generate`, where `tokens` were the first draw.
    """
    keys = sequence_keys(key, len(tokens))

    def draw(logits: Array, column: Array) -> Array:
        return sample(sampler, logits, jax.vmap(jax.random.fold_in, (0, None))(keys, column))

    has_drafts, fed = num_draft_tokens(cache.plan) > 0, tokens[:, None]
    if has_drafts:  # the first draft, before any token is committed (SpeCache, Algorithm 2)
        logits, cache = step(params, fed, cache, 0, target)
        fed = jnp.stack([tokens, draw(logits[:, 0], jnp.int32(1))], 1)

    def run_step(carry: tuple[Array, Cache], column: Array) -> tuple[tuple[Array, Cache], Array]:
        fed, cache = carry
        logits, cache = step(params, fed, cache, 1, target)
        new = draw(logits[:, 0], column)
        fed = jnp.stack([new, draw(logits[:, 1], column + 1)], 1) if has_drafts else new[:, None]
        return (fed, cache), new

    (_, cache), out = lax.scan(run_step, (fed, cache), jnp.arange(1, num_tokens + 1, dtype=jnp.int32))
    return out.T, cache
