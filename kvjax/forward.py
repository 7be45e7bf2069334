"""The decoder under a method: uncached, prefill, chunk by chunk, extend. Pure functions of parameters and state."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from kvjax.attention import attend_dense, causal, merge
from kvjax.kv.method import Method
from kvjax.kv.state import LayerState, State
from kvjax.models.config import Config
from kvjax.models.decoder import Decoder
from kvjax.models.sharding import constrain
from kvjax.types import Array, Block


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a program is compiled for beside shapes: hashable, so that it can be a static argument."""

    config: Config
    plan: tuple[Method, ...] = ()
    capacity: int = 0
    mesh: Mesh | None = None


class Past(NamedTuple):
    """A prefill under way: dense keys and values of each layer, and the hidden state of each row's last token."""

    layers: tuple[tuple[Array, Array], ...]  # (k, v), each [B K S H]
    last: Array  # [B D]


def apply(params: Any, setting: Setting, tokens: Array, pos: Array, attend, method, **more) -> tuple[Array, tuple]:
    """Runs a Decoder method with the parameters' dtype."""
    decoder = Decoder(setting.config, params["embedding"].dtype)
    return decoder.apply({"params": params}, tokens, pos, attend, **more, method=method)


def _positions(tokens: Array, lengths: Array | None = None) -> Array:
    pos = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return pos if lengths is None else jnp.where(pos < lengths[:, None], pos, -1)


def uncached(params: Any, tokens: Array, setting: Setting) -> Array:
    """tokens i32[B T] -> logits f32[B T V], exact attention, no cache."""
    attend = lambda i, q, k, v: (causal(q, k, v, window=setting.config.window(i)), None)  # noqa: E731
    return apply(params, setting, tokens, _positions(tokens), attend, Decoder.logits)[0]


def prefill(params: Any, tokens: Array, lengths: Array, setting: Setting) -> tuple[Array, State]:
    """tokens i32[B T], lengths i32[B] -> (logits of each row's last token f32[B V], state).

    Attention is exact; a layer's full keys and values exist only until its method has encoded them.
    """
    pos = _positions(tokens, lengths)[:, None]

    def attend(i, q, k, v):
        q, k, v = _heads(q, k, v, setting.mesh)
        window = setting.config.window(i)
        if i + 1 < setting.config.layers:
            out = causal(q, k, v, window=window)
        else:  # only each row's last token asks
            out = merge([attend_dense(q, Block(k, v, pos), lengths[:, None] - 1, window)])
        return out, setting.plan[i].prefill(Block(k, v, pos), setting.capacity)

    hidden, layers = apply(params, setting, tokens, _positions(tokens), attend, Decoder.__call__, last=lengths - 1)
    return unembed(params, hidden[:, 0], setting), State(layers, lengths, setting.capacity)


def prefill_chunk(params: Any, tokens: Array, start: Array, lengths: Array, past: Past, setting: Setting) -> Past:
    """Adds the chunk tokens i32[B C], at positions start..start+C-1 of all rows, to what came before."""
    pos = start + _positions(tokens)

    def attend(i, q, k, v):
        at = (0, 0, start, 0)
        k, v = (lax.dynamic_update_slice(old, new, at) for old, new in zip(past.layers[i], (k, v), strict=True))
        return causal(q, k, v, start, setting.config.window(i)), (k, v)

    hidden, layers = apply(params, setting, tokens, pos, attend, Decoder.__call__)
    at = lengths - 1 - start
    inside = (at >= 0) & (at < tokens.shape[1])
    row = jnp.take_along_axis(hidden, jnp.clip(at, 0, tokens.shape[1] - 1)[:, None, None], 1)[:, 0]
    return Past(layers, jnp.where(inside[:, None], row, past.last))


def start_chunks(batch: int, slots: int, dtype: Any, setting: Setting) -> Past:
    """An empty `Past` with room for `slots` tokens per row."""
    c = setting.config
    empty = lambda: jnp.zeros((batch, c.kv_heads, slots, c.head_dim), dtype)  # noqa: E731
    return Past(tuple((empty(), empty()) for _ in range(c.layers)), jnp.zeros((batch, c.width), dtype))


def encode_layer(k: Array, v: Array, lengths: Array, layer: int, setting: Setting) -> LayerState:
    """The dense keys and values [B K S H] that a chunked prefill gathered -> the state of that layer's method."""
    k, v = k[:, :, : setting.capacity], v[:, :, : setting.capacity]  # what lies beyond is padding
    pos = _positions(k[:, 0, :, 0], lengths)[:, None]
    return setting.plan[layer].prefill(Block(k, v, pos), setting.capacity)


def unembed(params: Any, hidden: Array, setting: Setting) -> Array:
    """hidden [B D] -> logits f32[B V]."""
    decoder = Decoder(setting.config, params["embedding"].dtype)
    return decoder.apply({"params": params}, hidden, method=Decoder.unembed)


def extend(params: Any, tokens: Array, state: State, setting: Setting, lengths: Array | None = None):
    """tokens i32[B T] after what the state holds -> (logits f32[B T V], state); lengths i32[B] when rows are padded.

    Under a method with lookahead the tokens are decoded one by one, each beside the model's own guess of the next.
    """
    real = _positions(tokens, lengths) >= 0
    if not any(m.lookahead for m in setting.plan):
        return advance(params, tokens, state, setting, tokens.shape[1], real)
    first, state = advance(params, tokens[:, :1], state, setting, 0, real[:, :1])

    def step(carry, xs):
        (guess, state), (token, real) = carry, xs
        both, known = jnp.stack([token, guess], 1), jnp.stack([real, real], 1)
        logits, state = advance(params, both, state, setting, 1, known)
        return (logits[:, 1].argmax(-1).astype(jnp.int32), state), logits[:, 0]

    guess = first[:, 0].argmax(-1).astype(jnp.int32)
    (_, state), logits = lax.scan(step, (guess, state), (tokens.T, real.T))
    return logits.swapaxes(0, 1), state


def advance(params: Any, tokens: Array, state: State, setting: Setting, commit: int, real: Array | None = None):
    """tokens i32[B T], of which the first `commit` are kept -> (logits f32[B T V], state); real bool[B T], or all."""
    pos = state.length[:, None] + _positions(tokens)
    pos = pos if real is None else jnp.where(real, pos, -1)

    def attend(i, q, k, v):
        q, k, v = _heads(q, k, v, setting.mesh)
        return setting.plan[i].extend(state.layers[i], q, k, v, pos, commit, setting.config.window(i))

    logits, layers = apply(params, setting, tokens, jnp.maximum(pos, 0), attend, Decoder.logits)
    kept = commit if real is None else real[:, :commit].sum(-1, dtype=jnp.int32)
    return logits, dataclasses.replace(state, layers=layers, length=state.length + kept)


def _heads(q: Array, k: Array, v: Array, mesh: Mesh | None) -> tuple[Array, Array, Array]:
    return constrain(q, "B K G T H", mesh), constrain(k, "B K T H", mesh), constrain(v, "B K T H", mesh)
