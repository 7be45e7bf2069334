"""The decoder traced through all layers at once, around what attention is to read. Pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.cache.contract import Layer
from kvjax.core.attention import causal
from kvjax.core.mesh import constrain
from kvjax.core.types import Array
from kvjax.models.config import Config
from kvjax.models.decoder import Decoder

Plan = tuple[Layer, ...]  # a method bound to each layer


@dataclasses.dataclass(frozen=True)
class Setting:
    """What programs of a model are compiled for beside shapes: hashable, so that it can be a static argument."""

    config: Config
    mesh: Mesh | None = None


def apply(params: Any, setting: Setting, tokens: Array, pos: Array, attend, method, **more) -> tuple[Array, tuple]:
    """Runs a Decoder method with the parameters' dtype; `more` goes to flax."""
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


def guesses(plan: Plan) -> int:
    """Guessed tokens that each step carries beside the true one."""
    return max(layer.needs.guesses for layer in plan)


def heads(q: Array, k: Array, v: Array, mesh: Mesh | None) -> tuple[Array, Array, Array]:
    """Queries, keys and values where their heads belong."""
    return constrain(q, "B K G T H", mesh), constrain(k, "B K T H", mesh), constrain(v, "B K T H", mesh)
