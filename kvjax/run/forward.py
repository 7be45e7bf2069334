"""The decoder under a method: uncached, prefill, chunk by chunk, extend. Pure functions of parameters and state."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from kvjax.cache.contract import LayerState, State
from kvjax.cache.method import Method
from kvjax.core.attention import attend_dense, causal, merge
from kvjax.core.mesh import constrain
from kvjax.core.observe import Obs
from kvjax.core.types import Array, Block
from kvjax.models.config import Config
from kvjax.models.decoder import Decoder, pick


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a program is compiled for beside shapes: hashable, so that it can be a static argument."""

    config: Config
    plan: tuple[Method, ...] = ()  # one per layer
    capacity: int = 0  # tokens per row
    slots: tuple[int, ...] = ()  # per layer, for a prefill
    mesh: Mesh | None = None


class Past(NamedTuple):
    """A prefill under way: what its layers will be encoded from, and the hidden state of each row's last token."""

    layers: tuple[tuple[Array, Array, Array], ...]  # k, v [B K S H], and the queries to be shown, [B K G Q H]
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
    if any(m.restricted for m in setting.plan):
        return _prefill_restricted(params, tokens, lengths, setting)
    pos = _positions(tokens, lengths)
    shown = max((m.queries for m in setting.plan if m.queries is not None), default=0)
    everything = any(m.queries is None for m in setting.plan)
    ask = pos if everything else _last_positions(lengths, max(shown, 1))  # what the last layer has queries of

    def attend(i, q, k, v):
        q, k, v = _heads(q, k, v, setting.mesh)
        window, method, final = setting.config.window(i), setting.plan[i], i + 1 == setting.config.layers
        block = Block(k, v, pos[:, None])
        if final and not everything:  # no other token asks
            out = merge([attend_dense(q, block, ask, window)])
        else:
            out = causal(q, k, v, window=window)
        return out, method.prefill(block, setting.slots[i], _shown(method, q, ask if final else pos, lengths))

    last = None if everything else jnp.maximum(ask, 0)
    hidden, layers = apply(params, setting, tokens, _positions(tokens), attend, Decoder.__call__, last=last)
    hidden = pick(hidden, lengths[:, None] - 1) if everything else hidden[:, -1:]
    return unembed(params, hidden[:, 0], setting), State(layers, lengths, setting.capacity)


def _last_positions(lengths: Array, n: int) -> Array:
    """i32[B n]: the last n positions of each row, -1 where it has fewer."""
    return jnp.maximum(lengths[:, None] - n + jnp.arange(n, dtype=jnp.int32)[None], -1)


def _shown(method: Method, q: Array, pos: Array, lengths: Array) -> Obs | None:
    """Of queries [B K G Q H] at pos i32[B Q], all of the prompt's or its last ones, those that the method wants."""
    if method.queries is None:
        return Obs(q, pos)
    if method.queries == 0:
        return None
    wanted = _last_positions(lengths, method.queries)
    if pos.shape[1] > method.queries:
        first = jnp.maximum(pos[:, :1], 0)
        q = jnp.take_along_axis(q, jnp.maximum(wanted - first, 0)[:, None, None, :, None], 3)
    return Obs(q, wanted)


def _prefill_restricted(params: Any, tokens: Array, lengths: Array, setting: Setting) -> tuple[Array, State]:
    """A prompt fed as what follows an empty state, chunk by chunk, where the method restricts its attention too."""
    B, T = tokens.shape
    chunk = setting.plan[0].chunk
    dtype = params["embedding"].dtype
    layers = tuple(m.empty(B, n, dtype) for m, n in zip(setting.plan, setting.slots, strict=True))
    state = State(layers, jnp.zeros_like(lengths), setting.capacity)
    tokens = jnp.pad(tokens, [(0, 0), (0, -T % chunk)])

    def step(carry, xs):
        (state, last), (part, start) = carry, xs
        real = start + _positions(part) < lengths[:, None]
        hidden, state = _hidden(params, part, state, setting, chunk, real)
        return (state, _if_inside(hidden, lengths - 1 - start, last)), None

    parts = tokens.reshape(B, -1, chunk).swapaxes(0, 1)
    starts = jnp.arange(parts.shape[0], dtype=jnp.int32) * chunk
    last = jnp.zeros((B, setting.config.width), dtype)
    (state, last), _ = lax.scan(step, (state, last), (parts, starts))
    return unembed(params, last, setting), state


def prefill_chunk(params: Any, tokens: Array, start: Array, lengths: Array, past: Past, setting: Setting) -> Past:
    """Adds the chunk tokens i32[B C], at positions start..start+C-1 of all rows, to what came before."""
    pos = start + _positions(tokens)

    def attend(i, q, k, v):
        at = (0, 0, start, 0)
        old_k, old_v, shown = past.layers[i]
        k, v = (lax.dynamic_update_slice(old, new, at) for old, new in ((old_k, k), (old_v, v)))
        out = causal(q, k, v, start, setting.config.window(i))
        return out, (k, v, _keep_shown(setting.plan[i], shown, q, start, lengths))

    hidden, layers = apply(params, setting, tokens, pos, attend, Decoder.__call__)
    return Past(layers, _if_inside(hidden, lengths - 1 - start, past.last))


def _keep_shown(method: Method, shown: Array, q: Array, start: Array, lengths: Array) -> Array:
    """The queries that the method wants to see [B K G Q H], with those of the chunk q [B K G C H] put in."""
    if method.queries is None:
        return lax.dynamic_update_slice(shown, q, (0, 0, 0, start, 0))
    at = _last_positions(lengths, method.queries) - start
    inside = ((at >= 0) & (at < q.shape[3]))[:, None, None, :, None]
    new = jnp.take_along_axis(q, jnp.clip(at, 0, q.shape[3] - 1)[:, None, None, :, None], 3)
    return jnp.where(inside, new, shown)


def _if_inside(hidden: Array, at: Array, otherwise: Array) -> Array:
    """hidden [B C D] at index at i32[B] where that is one of the C, otherwise [B D]."""
    inside = (at >= 0) & (at < hidden.shape[1])
    row = jnp.take_along_axis(hidden, jnp.clip(at, 0, hidden.shape[1] - 1)[:, None, None], 1)[:, 0]
    return jnp.where(inside[:, None], row, otherwise)


def start_chunks(batch: int, slots: int, dtype: Any, setting: Setting) -> Past:
    """An empty `Past` with room for `slots` tokens per row."""
    c = setting.config

    def layer(method):
        held = lambda *axes: jnp.zeros((batch, c.kv_heads, *axes, c.head_dim), dtype)  # noqa: E731
        return held(slots), held(slots), held(c.groups, slots if method.queries is None else method.queries)

    return Past(tuple(map(layer, setting.plan)), jnp.zeros((batch, c.width), dtype))


def encode_layer(k: Array, v: Array, q: Array, lengths: Array, layer: int, setting: Setting) -> LayerState:
    """What a chunked prefill gathered for one layer, as in `Past` -> the state of that layer's method."""
    method = setting.plan[layer]
    width = min(k.shape[2], setting.capacity)  # what lies beyond is padding
    k, v = k[:, :, :width], v[:, :, :width]
    pos = _positions(k[:, 0, :, 0], lengths)
    obs = None
    if method.queries is None:
        obs = Obs(q[:, :, :, :width], pos)
    elif method.queries:
        obs = Obs(q, _last_positions(lengths, method.queries))
    return method.prefill(Block(k, v, pos[:, None]), setting.slots[layer], obs)


def unembed(params: Any, hidden: Array, setting: Setting) -> Array:
    """hidden [... D] -> logits f32[... V]."""
    decoder = Decoder(setting.config, params["embedding"].dtype)
    return decoder.apply({"params": params}, hidden, method=Decoder.unembed)


def extend(
    params: Any,
    tokens: Array,
    state: State,
    setting: Setting,
    lengths: Array | None = None,
    told: Array | None = None,
) -> tuple[Array, State]:
    """tokens i32[B T] after what the state holds -> (logits f32[B T V], state); lengths i32[B] when rows are padded.

    A method with lookahead takes them one by one, each beside the next one where that is told (bool[B T], all by
    default), otherwise and after the last one beside the model's own guess.
    """
    real = _positions(tokens, lengths) >= 0
    if not any(m.lookahead for m in setting.plan):
        return advance(params, tokens, state, setting, tokens.shape[1], real)
    first, state = advance(params, tokens[:, :1], state, setting, 0, real[:, :1])
    known = jnp.pad(real[:, 1:], [(0, 0), (0, 1)])
    known = known if told is None else known & told
    following = jnp.pad(tokens[:, 1:], [(0, 0), (0, 1)])

    def step(carry, xs):
        (guess, state), (token, real, following, known) = carry, xs
        both = jnp.stack([token, jnp.where(known, following, guess)], 1)
        logits, state = advance(params, both, state, setting, 1, jnp.stack([real, real], 1))
        return (logits[:, 1].argmax(-1).astype(jnp.int32), state), logits[:, 0]

    guess = first[:, 0].argmax(-1).astype(jnp.int32)
    (_, state), logits = lax.scan(step, (guess, state), (tokens.T, real.T, following.T, known.T))
    return logits.swapaxes(0, 1), state


def advance(params: Any, tokens: Array, state: State, setting: Setting, commit: int, real: Array | None = None):
    """tokens i32[B T], of which the first `commit` are kept -> (logits f32[B T V], state); real bool[B T], or all."""
    hidden, state = _hidden(params, tokens, state, setting, commit, real)
    return unembed(params, hidden, setting), state


def _hidden(params: Any, tokens: Array, state: State, setting: Setting, commit: int, real: Array | None):
    pos = state.length[:, None] + _positions(tokens)
    pos = pos if real is None else jnp.where(real, pos, -1)

    def attend(i, q, k, v):
        q, k, v = _heads(q, k, v, setting.mesh)
        return setting.plan[i].extend(state.layers[i], q, k, v, pos, commit, setting.config.window(i))

    hidden, layers = apply(params, setting, tokens, jnp.maximum(pos, 0), attend, Decoder.__call__)
    kept = commit if real is None else real[:, :commit].sum(-1, dtype=jnp.int32)
    return hidden, dataclasses.replace(state, layers=layers, length=state.length + kept)


def _heads(q: Array, k: Array, v: Array, mesh: Mesh | None) -> tuple[Array, Array, Array]:
    return constrain(q, "B K G T H", mesh), constrain(k, "B K T H", mesh), constrain(v, "B K T H", mesh)
