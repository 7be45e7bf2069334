"""Logits that are not finite: noticed in all that a call returns, and traced to the layer where such numbers come up.

Every call of `kvjax.generation` ends here before it returns logits, tokens or scores: prompts and fed tokens by
`check_logits`, decoded tokens by a flag that the decode loop carries. Only real tokens count; padding and what follows
the end of a sequence may be anything. The layer is looked for by a second run, after a failure alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.protocol import Cache
from kvjax.cache.sequences import take_sequences
from kvjax.core import memory
from kvjax.core.attention import causal_attention
from kvjax.core.mesh import to_numpy
from kvjax.core.types import Array, pytree
from kvjax.engine import decode
from kvjax.engine.forward import BoundLayers, Target, apply_layer, embed, layer_calls, outer_params, run_layers
from kvjax.engine.layer_prompt import LayerCall, LayerInputs
from kvjax.engine.modes import ForwardMode
from kvjax.engine.prefill import take_last
from kvjax.errors import KvjaxError
from kvjax.generation.inputs import pad
from kvjax.models.decoder import MLP, Attention, Layer
from kvjax.models.model import Model

REMEDIES = {
    "float16": "load the model with dtype='bfloat16' or dtype='float32'",
    "bfloat16": "load the model with dtype='float32'",
    "float32": "its weights are damaged, or too large: convert its checkpoint again",
}


def check_logits(
    model: Model,
    logits: Array,
    ids: Sequence[Sequence[int]] | None = None,
    *,
    lengths: Sequence[int] | None = None,
    cache: Cache | None = None,
    what: str = "prompt",
) -> None:
    """Raises KvjaxError where logits are not finite, naming the first layer with such numbers if it can.

    Args:
      model: that computed them.
      logits: f32[B V] of the last tokens, or f32[B T V].
      ids: of the tokens that were run, where they are known.
      lengths: the tokens of each sequence that are real in f32[B T V]; by default those of `ids`.
      cache: what the tokens followed, None for nothing.
      what: what the tokens are, in the message.
    """
    if logits.ndim == 3 and lengths is None:
        assert ids is not None
        lengths = [len(row) for row in ids]
    bad = _first_bad_token(logits, lengths)
    if bad is None:
        return
    row, token = bad
    known, at = None if ids is None else list(ids[row]), ""
    if known is not None and token is not None:
        known, at = known[: token + 1], f", token {token} of {len(known)}"
    if cache is not None:
        pairs, which = zip(cache.plan, cache.layers, strict=True), np.array([row], np.int32)
        layers = tuple(take_sequences(layer, state, which) for layer, state in pairs)
        cache = dataclasses.replace(cache, layers=layers, length=cache.length[row : row + 1])
    raise nonfinite_error(model, f"after {what} {row}{at}", known, cache)


def nonfinite_error(
    model: Model, place: str, ids: Sequence[int] | None = None, cache: Cache | None = None
) -> KvjaxError:
    """Makes the error; `ids` are of one sequence, from its beginning or after a cache of one sequence."""
    remedy, model = REMEDIES[model.dtype.name], model if cache is None else model.with_config(cache.config)
    if any(not x.is_fully_addressable for x in jax.tree.leaves(model.params)):
        # A search by collectives, which an error of one process alone would not end.
        return KvjaxError(f"the logits {place} are not finite; {remedy}, or run it in one process to see the place")
    try:
        cause, remedy = _explain(model, ids, cache)
    except jax.errors.JaxRuntimeError:  # the search takes memory, and the error must not be about that
        cause = "their origin is not known"
    return KvjaxError(f"the logits {place} are not finite: {cause}; {remedy}")


def _first_bad_token(logits: Array, lengths: Sequence[int] | None) -> tuple[int, int | None] | None:
    """Finds the first sequence with logits that are not finite, and its first such token in f32[B T V]."""
    if not memory.is_on_cpu(logits):
        is_finite = np.array(to_numpy(_is_finite_on_device(logits)))
    elif logits.shape[-1]:
        # The extremes of a token show NaN and infinities, and take no array of booleans as large as the logits.
        x = to_numpy(logits)
        is_finite = np.isfinite(x.min(-1)) & np.isfinite(x.max(-1))
    else:  # unknown logits, after a crop
        return None
    if lengths is not None:
        is_finite |= np.arange(logits.shape[1])[None] >= np.asarray(lengths)[:, None]
    if is_finite.all():
        return None
    row = int(np.argmin(is_finite.reshape(len(is_finite), -1).all(1)))
    return row, None if lengths is None else int(np.argmin(is_finite[row]))


@jax.jit
def _is_finite_on_device(logits: Array) -> Array:
    return jnp.isfinite(logits).all(-1)


def _explain(model: Model, ids: Sequence[int] | None, cache: Cache | None) -> tuple[str, str]:
    """Returns the cause and the remedy."""
    dtype, remedy = model.dtype.name, REMEDIES[model.dtype.name]
    for path, x in jax.tree_util.tree_leaves_with_path(model.auto_params):
        if not to_numpy(jnp.isfinite(x).all()):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return f"the parameter {name} of the model is not", "convert its checkpoint again, or load it anew"
    if ids is None and cache is not None:
        return _explain_by_cache(cache, model.config.layers), f"{remedy}, or take another method"
    if ids is None:
        return f"{dtype} cannot hold what the model or the method computes", remedy
    # A second run on a cache is one device's.
    place = _find_place(model, ids, cache) if cache is None or model.mesh is None else None
    if place is None and cache is None:
        return (
            f"the exact pass of the same tokens is finite, and so the method computes what {dtype} cannot hold",
            f"take another method, or other parameters of it; or {remedy}",
        )
    place = place or "a place that a second run does not show"
    return f"{dtype} cannot hold what comes up in {place}", remedy


def _explain_by_cache(cache: Cache, num_layers: int) -> str:
    for i, state in enumerate(cache.layers):
        floats = [to_numpy(x) for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        if any(np.isnan(x).any() for x in floats):
            return f"the cache has such numbers from layer {i + 1} of {num_layers} on"
    return (
        f"the cache holds none in any layer, and so {cache.dtype} cannot hold what comes up in layer {num_layers} of "
        f"{num_layers} or in the head"
    )


def _find_place(model: Model, ids: Sequence[int], cache: Cache | None) -> str | None:
    """Runs tokens of one sequence with a look at each layer; returns the first place with numbers that are not finite.

    Without a cache the pass is exact: None where all its numbers are finite.
    """
    num_layers, seen = model.config.layers, []

    def run_layer(params: Any, hidden: Array, *more: Any, call: LayerCall, target: Target) -> tuple:
        outputs, parts = _run_watched_layer(params, hidden, *more, call=call, target=target)
        seen.append(parts)
        return outputs

    target = Target(model.config, run_layer=run_layer)
    if cache is not None:
        tokens = jnp.asarray([ids], jnp.int32)
        logits = decode.extend(model.auto_params, tokens, cache, target)[0][:, -1]
    else:
        tokens, lengths = (jnp.asarray(x) for x in pad([ids]))
        outer, nothing = outer_params(model.auto_params), (None,) * num_layers
        calls = layer_calls(cast(BoundLayers, (None,) * num_layers), model.config)
        hidden, angles, pos = embed(outer, tokens, None, lengths, target=target)
        mode = ExactPass(pos)
        hidden, _ = run_layers(model.auto_params, hidden, angles, mode, calls, nothing, target=target)
        logits = target.unembed(outer, take_last(hidden, lengths), target=target)
    for i, parts in enumerate(seen):
        for name, is_finite in zip(WATCHED.values(), parts, strict=True):
            if not is_finite:
                return f"layer {i % num_layers + 1} of {num_layers} ({name})"
    return None if to_numpy(jnp.isfinite(logits).all()) else "the final norm or the head"


# In the order in which a layer's parts end.
WATCHED = {Attention: "its attention", MLP: "its MLP", Layer: "the sum of its residuals"}


@functools.partial(jax.jit, static_argnames=("call", "target"))
def _run_watched_layer(
    params: Any, hidden: Array, angles: Any, mode: Any, *state: Any, call: LayerCall, target: Target
) -> tuple[tuple, tuple[Array, ...]]:
    """Runs `apply_layer`; returns also whether each of the `WATCHED` parts gave finite outputs for all real tokens."""
    is_real = mode.pos >= 0  # both modes have the positions of their tokens
    parts: dict[type, Array] = {}

    def watch(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        out = next_fun(*args, **kwargs)
        if type(context.module) in WATCHED and context.method_name == "__call__":
            y = out[0] if isinstance(out, tuple) else out
            parts[type(context.module)] = (jnp.isfinite(y).all(-1) | ~is_real).all()
        return out

    with nn.intercept_methods(watch):
        outputs = apply_layer(params, hidden, angles, mode, *state, call=call, target=target)
    return outputs, tuple(parts[module] for module in WATCHED)


@pytree
class ExactPass(ForwardMode):
    """Runs a whole text under exact attention, and keeps nothing."""

    pos: Array  # i32[B T], -1 for padding

    def share(self, inputs: LayerInputs) -> tuple[Array, Array]:
        """Returns the keys and values of the text."""
        return inputs.k, inputs.v

    def attend(
        self, call: LayerCall, state: None, inputs: LayerInputs, cross_layer: Any, mesh: Mesh | None
    ) -> tuple[Array, None, Any]:
        k, v = (inputs.k, inputs.v) if inputs.source is None else inputs.source[1]
        return causal_attention(inputs.q, k, v, rule=call.rule, sinks=inputs.sinks), None, cross_layer
