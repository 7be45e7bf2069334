"""Attention of one layer of a decoder that is not kvjax's: it reads the layer's cache and fills it.

A prompt or a step runs the forward modes of `kvjax.engine` that kvjax's own decoder runs; there is no second path.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from kvjax.core.explicit_axes import accepts_explicit_axes, layer_specs, spec_of
from kvjax.core.mesh import auto_mesh, named_sharding, vary
from kvjax.core.precision import computes_in_32_bits
from kvjax.core.types import Array
from kvjax.custom_decoder.call_checks import (
    arrange,
    check_call,
    find_wrong_sequences,
    read_observed,
    read_positions,
    read_sinks,
)
from kvjax.custom_decoder.layer_cache import Empty, ExactPrompt, LayerCache
from kvjax.engine.layer_prompt import LayerCall, LayerInputs, begin_prompt
from kvjax.engine.modes import ChunkedPrefill, Decode, ForwardMode, FullPrefill, PromptReplay
from kvjax.errors import KvjaxError
from kvjax.utils import arguments
from kvjax.utils.keywords import checks_keywords


def _attended_specs(
    result: Any, cache: LayerCache, q: Array, k: Array, v: Array, *_: Any, layout: str = "BTNH", **__: Any
) -> Any:
    """Returns the specs of what `attend` returns: outputs lie as the queries do, and a new state as the keys."""
    keys, mesh = spec_of(k), cache.layer.mesh
    sequences, heads = (keys[0], keys[layout.index("N")]) if mesh is None else named_sharding("B K", mesh).spec
    by_layer = functools.partial(
        layer_specs, num_sequences=k.shape[0], num_heads=cache.layer.spec.num_kv_heads, sequences=sequences, heads=heads
    )
    out = PartitionSpec(*spec_of(q)[:3], spec_of(v)[3])
    # A step returns the types that it is given, so that the cache is a carry of the caller's loop.
    after = by_layer(result[1]) if isinstance(cache.state, Empty) else jax.tree.map(spec_of, cache)
    return out, after, *by_layer(result[2:])


@checks_keywords
@computes_in_32_bits
@accepts_explicit_axes(
    _attended_specs, lambda cache, *_, **__: cache.layer.mesh if isinstance(cache, LayerCache) else None
)
def attend(
    cache: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    positions: Array | np.ndarray,
    *,
    hidden: Array | None = None,
    output_projection: Array | None = None,
    sinks: Array | np.ndarray | None = None,
    commit: int | None = None,
    scale: float | None = None,
    layout: str = "BTNH",
    cross_layer: Any = ...,
) -> Any:
    """Attends the queries of one layer to its cache and to the new tokens, which the cache then holds.

    The first call is the prompt: its tokens attend to each other, and the method compresses them. Every further call is
    a step of one token or more.

    Args:
      cache: of this layer.
      q: queries [B T N H], after RoPE.
      k: keys [B T K H], after RoPE.
      v: values [B T K V].
      positions: i32[B T], the tokens' positions in the text: 0, 1, 2, .. in each sequence over all calls, -1 for
        padding, which may stand on any side.
      hidden: [B T D], what q, k and v were projected from, where the method needs it.
      output_projection: [N V D], where the method needs it.
      sinks: [N], a learned logit of each query head that takes weight and gives no value (gpt-oss); None for none.
      commit: static, how many of a step's tokens the cache keeps, the first ones; None for all. Those beyond are
        drafts, which attend to the cache and to each other, and leave no trace.
      scale: of the dot products; None: H ** -0.5, for queries that are not scaled. A decoder that multiplies its
        queries by the scale beforehand says scale=1.0.
      layout: "BTNH", or "BNTH" for q [B N T H], k [B K T H], v [B K T V] and outputs alike.
      cross_layer: the value from the layer below in this pass, None in the first layer; where it is given, the value
        for the layer above is returned too.

    Returns:
      (outputs [B T N V] in q's dtype, before the output projection; the next cache), or (outputs, cache, cross_layer).
      Outputs of padding mean nothing. Under `jax_enable_x64` arrays of 64 bits are narrowed, and outputs have 32.

    Raises:
      KvjaxError: arrays that contradict the layer's spec, a prompt that waits for `finish`, or, where their values are
        known, positions that do not continue the sequence, or tokens beyond the capacity. Inside `jax.jit` values are
        not known: such a sequence then has outputs of NaN.
    """
    if not isinstance(cache, LayerCache):
        raise KvjaxError(
            f"cache is that of one layer, an entry of what custom_decoder.attach returns, got {type(cache).__name__}; "
            "give cache[i] in layer i"
        )
    q, k, v = arrange(q, k, v, layout, cache.layer.spec)
    B, K, G, T, H = q.shape
    dtype = q.dtype
    positions, is_right_padded = read_positions(positions, B, T)
    commit = T if commit is None else arguments.integer("commit", commit, 0, T)
    has_cross_layer = cross_layer is not ...  # None is a value, that of the first layer
    check_call(cache, q, k, commit, has_cross_layer)
    if scale is not None:
        q = (q.astype(jnp.float32) * (scale * H**0.5)).astype(dtype)
    hidden, output_projection = read_observed(cache, hidden, output_projection, B, T)
    inputs = LayerInputs(q, k, v, hidden, output_projection, read_sinks(sinks, K, G))

    # The engine takes padding on the right. A step of one token has no order, and copies are made in the cache's own.
    order = None
    if T > 1 and not is_right_padded and not isinstance(cache.state, ExactPrompt):
        order = jnp.argsort(positions < 0, axis=1, stable=True)
        inputs, positions = _reorder(inputs, order), jnp.take_along_axis(positions, order, 1)
    inputs = _clean(inputs, positions)
    up = cross_layer if has_cross_layer else None
    if isinstance(cache.state, ExactPrompt):
        out, cache, up = _attend_copy(cache, inputs, positions, up)
    else:
        before = jnp.zeros(B, jnp.int32) if cache.length is None else cache.length
        count = (positions >= 0).sum(1, dtype=jnp.int32)
        length = before + jnp.minimum(count, commit)
        is_wrong = find_wrong_sequences(cache, inputs, positions, before, count, length)
        if isinstance(cache.state, Empty):
            out, state, up = _attend_prompt(cache, inputs, length, order, up)
        else:
            out, state, up = _attend_step(cache, inputs, positions, commit, up, has_cross_layer)
        cache = LayerCache(state, cache.layer, length, k.dtype.name)
        if is_wrong is not None:
            out = jnp.where(is_wrong[:, None, None, None, None], jnp.nan, out)
    if order is not None:
        out = jnp.take_along_axis(out, jnp.argsort(order, axis=1)[:, None, None, :, None], 3)
    out = out.reshape(B, K * G, T, -1).astype(dtype)
    out = jnp.moveaxis(out, 1, 2) if layout == "BTNH" else out
    # Arrays of zeros are constants until the first token is written, and a caller's loop needs one type throughout.
    cache = vary(cache)
    return (out, cache, up) if has_cross_layer else (out, cache)


def _attend_prompt(cache: LayerCache, inputs: LayerInputs, length: Array, order: Array | None, up: Any) -> Any:
    """Runs the prompt; the state is compressed, or an `ExactPrompt` where it waits for all layers."""
    layer, needs = cache.layer, cache.layer.bound.needs
    if layer.defers or needs.prompt_chunk:
        mode: ForwardMode = ChunkedPrefill(np.int32(0), length)
    else:
        mode = FullPrefill(length, layer.capacity, None)
    out, state, up = _run(mode, None, inputs, up, call=layer.call(inputs.k.shape[2]), mesh=layer.mesh)
    if layer.defers:
        if not needs.prompt_chunk:
            state = state._replace(output_projection=inputs.output_projection, sinks=inputs.sinks)
        if needs.replay:
            state = state._replace(replay_scores=jnp.zeros(state.k.shape[:3], jnp.float32))
        state = ExactPrompt(state, order if needs.replay else None, None, cache.state.index)
    return out, state, up


def _attend_copy(cache: LayerCache, inputs: LayerInputs, positions: Array, up: Any) -> Any:
    """Runs the copy of a chunk of the prompt, which `finish` has the decoder repeat; its tokens are not stored."""
    layer, state = cache.layer, cache.state
    assert cache.length is not None
    mode, call = PromptReplay(state.start, positions, cache.length), LayerCall(layer.bound, layer.spec.rule)
    out, prompt, up = _run(mode, state.prompt, inputs, up, call=call, mesh=layer.mesh)
    return out, dataclasses.replace(cache, state=dataclasses.replace(state, prompt=prompt)), up


def _attend_step(
    cache: LayerCache, inputs: LayerInputs, positions: Array, commit: int, up: Any, has_cross_layer: bool
) -> Any:
    """Runs a step of one token or more, of which the cache keeps the first `commit`."""
    layer = cache.layer
    call = LayerCall(getattr(layer.bound, "after_prompt", layer.bound), layer.spec.rule)
    out, state, up = _run(Decode(positions, commit), cache.state, inputs, up, call=call, mesh=layer.mesh)
    if up is not None and not has_cross_layer:
        raise KvjaxError(
            "this method hands a value to the layer above, and does not say so in advance: set cross_layer = True in "
            "its reader"
        )
    return out, state, up


@functools.partial(jax.jit, static_argnames=("call", "mesh"))
def _run(mode: ForwardMode, state: Any, inputs: LayerInputs, up: Any, call: LayerCall, mesh: Mesh | None) -> Any:
    """Runs a forward mode of the engine, as its own decoder's layers do."""
    mesh = None if mesh is None else auto_mesh(mesh)
    if isinstance(mode, ChunkedPrefill):
        state = begin_prompt(call, *inputs[:4], mesh)
    return mode.attend(call, state, inputs, up, mesh)


def _reorder(inputs: LayerInputs, order: Array) -> LayerInputs:
    """Takes the tokens in another order, i32[B T]."""

    def take(x: Array, axis: int) -> Array:
        index = order.reshape(order.shape[0], *[1] * (axis - 1), order.shape[1], *[1] * (x.ndim - axis - 1))
        return jnp.take_along_axis(x, index, axis)

    hidden = None if inputs.hidden is None else take(inputs.hidden, 1)
    return inputs._replace(q=take(inputs.q, 3), k=take(inputs.k, 2), v=take(inputs.v, 2), hidden=hidden)


def _clean(inputs: LayerInputs, positions: Array) -> LayerInputs:
    """Puts zeros where padding is: weights of 0 times what a decoder leaves there may be NaN."""
    is_token = (positions >= 0)[:, None, :, None]

    def clean(x: Array, is_token: Array) -> Array:
        return jnp.where(is_token, x, jnp.zeros((), x.dtype))

    hidden = None if inputs.hidden is None else clean(inputs.hidden, is_token[:, 0])
    q, k, v = clean(inputs.q, is_token[:, None]), clean(inputs.k, is_token), clean(inputs.v, is_token)
    return inputs._replace(q=q, k=k, v=v, hidden=hidden)
