"""The decoder over an explicit cache: uncached, and fresh tokens on what a cache holds. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from kvjax.cache.contract import Cache, Layer
from kvjax.core.attention import causal
from kvjax.core.mesh import constrain
from kvjax.core.types import Array, Block
from kvjax.models.config import Config
from kvjax.models.decoder import Decoder
from kvjax.run import devices

Plan = tuple[Layer, ...]  # a method bound to each layer


@dataclasses.dataclass(frozen=True)
class Setting:
    """What programs of a model are compiled for beside shapes: hashable, so that it can be a static argument."""

    config: Config
    mesh: Mesh | None = None


def apply(params: Any, setting: Setting, tokens: Array, pos: Array, attend, method, **more) -> tuple[Array, tuple]:
    """Runs a Decoder method with the parameters' dtype."""
    decoder = Decoder(setting.config, params["embedding"].dtype)
    return decoder.apply({"params": params}, tokens, pos, attend, **more, method=method)


def positions(tokens: Array, lengths: Array | None = None) -> Array:
    """i32[B T]: 0, 1, ..; -1 beyond a row's length."""
    pos = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape[:2])
    return pos if lengths is None else jnp.where(pos < lengths[:, None], pos, -1)


def uncached(params: Any, tokens: Array, setting: Setting) -> Array:
    """tokens i32[B T] -> logits f32[B T V], exact attention, no cache."""

    def attend(i: int, q: Array, k: Array, v: Array, x: Array):
        return causal(q, k, v, window=setting.config.window(i)), None

    return apply(params, setting, tokens, positions(tokens), attend, Decoder.logits)[0]


def unembed(params: Any, hidden: Array, setting: Setting) -> Array:
    """hidden [... D] -> logits f32[... V]."""
    decoder = Decoder(setting.config, params["embedding"].dtype)
    return decoder.apply({"params": params}, hidden, method=Decoder.unembed)


def extend(
    params: Any,
    tokens: Array,
    cache: Cache,
    setting: Setting,
    lengths: Array | None = None,
    told: Array | None = None,
) -> tuple[Array, Cache]:
    """tokens i32[B T] after what the cache holds -> (logits f32[B T V], cache); lengths i32[B] when rows are padded.

    A method that guesses ahead takes them one by one, each beside the next one where that is told (bool[B T], all by
    default), otherwise and after the last one beside the model's own guess.
    """
    real = positions(tokens, lengths) >= 0
    if not guesses(cache.plan):
        return advance(params, tokens, cache, setting, tokens.shape[1], real)
    first, cache = advance(params, tokens[:, :1], cache, setting, 0, real[:, :1])
    known = jnp.pad(real[:, 1:], [(0, 0), (0, 1)])
    known = known if told is None else known & told
    following = jnp.pad(tokens[:, 1:], [(0, 0), (0, 1)])

    def step(carry, xs):
        (guess, cache), (token, real, following, known) = carry, xs
        both = jnp.stack([token, jnp.where(known, following, guess)], 1)
        logits, cache = advance(params, both, cache, setting, 1, jnp.stack([real, real], 1))
        return (logits[:, 1].argmax(-1).astype(jnp.int32), cache), logits[:, 0]

    guess = first[:, 0].argmax(-1).astype(jnp.int32)
    (_, cache), logits = lax.scan(step, (guess, cache), (tokens.T, real.T, following.T, known.T))
    return logits.swapaxes(0, 1), cache


def guesses(plan: Plan) -> int:
    """Guessed tokens that each step carries beside the true one."""
    return max(layer.needs.guesses for layer in plan)


def advance(
    params: Any, tokens: Array, cache: Cache, setting: Setting, commit: int, real: Array | None = None
) -> tuple[Array, Cache]:
    """tokens i32[B T], of which the first `commit` are kept -> (logits f32[B T V], cache); real bool[B T], or all."""
    pos = cache.length[:, None] + positions(tokens)
    pos = pos if real is None else jnp.where(real, pos, -1)
    carry = None

    def attend(i: int, q: Array, k: Array, v: Array, x: Array):
        nonlocal carry  # it goes up from layer to layer, and ends with the step
        q, k, v = heads(q, k, v, setting.mesh)
        layer, state, fresh = cache.plan[i], cache.layers[i], Block(k, v, pos[:, None])
        out, state, carry = devices.extend(layer, state, q, fresh, commit, carry, setting.mesh)
        return out, state

    hidden, layers = apply(params, setting, tokens, jnp.maximum(pos, 0), attend, Decoder.__call__)
    kept = commit if real is None else real[:, :commit].sum(-1, dtype=jnp.int32)
    return unembed(params, hidden, setting), dataclasses.replace(cache, layers=layers, length=cache.length + kept)


def heads(q: Array, k: Array, v: Array, mesh: Mesh | None) -> tuple[Array, Array, Array]:
    """Queries, keys and values where their heads belong."""
    return constrain(q, "B K G T H", mesh), constrain(k, "B K T H", mesh), constrain(v, "B K T H", mesh)
